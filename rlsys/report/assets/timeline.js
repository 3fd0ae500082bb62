// The timeline: one lane per track of an actor, on a canvas that can be zoomed and moved.

const LANE = 20;
const LABELS = 168;
const NARROW_LABELS = 96;

function timeline(model, originUnix) {
  if (!model.lanes.length) {
    return el("p", { class: "empty" }, "No trace.json, or the run was started with observe.trace=false.");
  }
  return new Timeline(model, originUnix).root;
}

class Timeline {
  constructor(model, originUnix) {
    this.model = model;
    this.origin = originUnix;
    const starts = model.lanes.flatMap((lane) => lane.spans.length ? [lane.spans[0][0]] : []);
    this.first = Math.min(...starts);
    this.last = Math.max(model.end, this.first + 1e-3);
    this.from = this.first;
    this.to = this.last;
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label":
      `Timeline of ${counted(model.lanes.length, "lane")}. Arrow keys move, plus and minus zoom, 0 shows all. ` +
      "The tables below have the sums." });
    this.status = el("output", { class: "status", "aria-live": "polite" }, " ");
    this.root = el("div", { class: "timeline" },
      el("div", { class: "tools" },
        button("Zoom in", () => this.zoom(0.5)), button("Zoom out", () => this.zoom(2)),
        button("◀", () => this.move(-0.4), "Earlier"), button("▶", () => this.move(0.4), "Later"),
        button("All", () => this.show(this.first, this.last)), this.legend()),
      this.canvas, this.status);
    this.listen();
    whenSized(this.canvas.parentElement, () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("keydown", (event) => {
      const action = {
        ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2),
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
        0: () => this.show(this.first, this.last), Escape: () => this.show(this.first, this.last),
      }[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.time(event.offsetX));
    }, { passive: false });
    let start = null;
    canvas.addEventListener("pointerdown", (event) => {
      start = this.time(event.offsetX);
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      this.point(event.offsetX, event.offsetY);
      this.selection = start === null ? null : [start, this.time(event.offsetX)];
      if (this.selection) this.draw();
    });
    canvas.addEventListener("pointerup", (event) => {
      const end = this.time(event.offsetX);
      const [low, high] = [Math.min(start ?? end, end), Math.max(start ?? end, end)];
      start = this.selection = null;
      if ((high - low) * this.scale > 6) this.show(low, high);
      else this.draw();
    });
    canvas.addEventListener("dblclick", () => this.show(this.first, this.last));
  }

  get labels() { return this.root.clientWidth < 560 ? NARROW_LABELS : LABELS; }
  get width() { return Math.max(80, this.root.clientWidth - this.labels); }
  get scale() { return this.width / (this.to - this.from); }
  time(x) { return this.from + Math.max(0, x - this.labels) / this.scale; }

  show(from, to) {
    const length = Math.max(1e-4, to - from);
    this.from = Math.max(this.first, Math.min(from, this.last - length));
    this.to = Math.min(this.last, this.from + length);
    this.draw();
    this.status.textContent = `Shown: ${seconds(this.from - this.first)} to ${seconds(this.to - this.first)}`;
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  move(share) {
    const by = Math.max(this.first - this.from, Math.min(this.last - this.to, share * (this.to - this.from)));
    this.show(this.from + by, this.to + by);
  }

  draw() {
    const { canvas, model, scale } = this;
    const ratio = devicePixelRatio;
    const height = model.lanes.length * LANE + 22;
    canvas.width = (this.labels + this.width) * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    model.lanes.forEach((lane, row) => {
      const y = row * LANE;
      ctx.fillStyle = color("muted");
      if (row === 0 || model.lanes[row - 1].process !== lane.process) {
        ctx.fillStyle = color("grid");
        ctx.fillRect(0, y, this.labels + this.width, 1);
        ctx.fillStyle = color("text");
      }
      const label = this.labels < LABELS ? `${lane.process} ${lane.track}` : `${lane.process} · ${lane.track}`;
      ctx.fillText(label, 0, y + LANE / 2, this.labels - 8);
      this.drawLane(ctx, lane, y, scale);
    });
    this.drawAxis(ctx, model.lanes.length * LANE);
    if (!this.selection) return;
    const [a, b] = this.selection.map((time) => this.labels + (time - this.from) * scale);
    ctx.fillStyle = color("select");
    ctx.fillRect(Math.min(a, b), 0, Math.abs(b - a), height);
  }

  /** Draw a lane. The height of merged spans is their share of the time; kinds are stacked. */
  drawLane(ctx, lane, y, scale) {
    const room = LANE - 6;
    let stacked = [];
    for (const [start, length, kind, count, within] of lane.spans) {
      const share = count && length ? Math.min(1, within / length) : 1;
      stacked = stacked.filter((one) => one.end > start);
      const below = share < 1 ? stacked.reduce((sum, one) => sum + one.share, 0) : 0;
      if (share < 1) stacked.push({ end: start + length, share });
      if (start + length < this.from || start > this.to) continue;
      const x = Math.max(0, (start - this.from) * scale);
      const end = Math.min(this.width, (start + length - this.from) * scale);
      const height = Math.max(1, share * room);
      ctx.fillStyle = kindColor(this.model.kinds[kind]);
      ctx.fillRect(this.labels + x, y + 3 + Math.max(0, room - height - below * room), Math.max(0.7, end - x), height);
    }
  }

  drawAxis(ctx, y) {
    ctx.fillStyle = color("muted");
    const step = niceStep((this.to - this.from) / Math.max(2, this.width / 110));
    const zero = this.first;
    for (let tick = Math.ceil((this.from - zero) / step) * step; tick <= this.to - zero; tick += step) {
      const x = this.labels + (tick + zero - this.from) * this.scale;
      ctx.fillRect(x, y, 1, 4);
      ctx.fillText(seconds(tick), Math.min(x + 3, this.labels + this.width - 40), y + 12);
    }
  }

  point(x, y) {
    const lane = this.model.lanes[Math.floor(y / LANE)];
    if (!lane || x < this.labels) return;
    const time = this.time(x);
    const slack = 1.5 / this.scale;
    const span = lane.spans.find(([start, length]) => start - slack <= time && time <= start + length + slack);
    if (!span) {
      this.status.textContent = `${lane.process} · ${lane.track}: nothing at ${seconds(time - this.first)}`;
      return;
    }
    const [start, length, kind, count, within] = span;
    const merged = count ? `, ${counted(count, "span")}, ${seconds(within)} within them` : "";
    this.status.textContent = `${lane.process} · ${lane.track}: ${this.model.kinds[kind]}, ` +
      `${seconds(length)} at ${seconds(start - this.first)}${merged}`;
  }

  legend() {
    const texts = [["work", "c1"], ["weights", "c2"], ["checkpoint", "c5"], ["waiting", "idle"]];
    return el("span", { class: "legend" }, texts.map(([text, name]) => el("span", {}, swatch(name), text)));
  }
}

function swatch(name) {
  const box = el("i", { class: "swatch", "aria-hidden": "true" });
  box.style.background = color(name);
  return box;
}

function button(text, onclick, label = null) {
  return el("button", { type: "button", onclick, "aria-label": label }, text);
}

const KIND_COLORS = new Map();

function kindColor(kind) {
  if (!KIND_COLORS.has(kind)) {
    let name = "c1";
    if (kind.startsWith("waits")) name = "idle";
    else if (/weight|publish|snapshot|hold/.test(kind)) name = "c2";
    else if (/write|checkpoint/.test(kind)) name = "c5";
    else if (/optimizer/.test(kind)) name = "c3";
    KIND_COLORS.set(kind, color(name));
  }
  return KIND_COLORS.get(kind);
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least);
}
