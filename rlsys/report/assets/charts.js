// Charts over optimizer steps: uPlot with a legend, keyboard control, and a table of the numbers.

const SYNC = uPlot.sync("steps");
const TABLE_ROWS = 40;
const MOST_BARS = 200; // of a histogram that also shows the values without a count

/**
 * Create a figure.
 *
 * lines: [{label, x, y, color, width, dash, points, low, high}], where low and high are the ends of
 * a band. bound: {value, label} draws a horizontal line.
 */
function chart(title, lines, { note = "", height = 190, bound = null, unit = "" } = {}) {
  const shown = lines.filter((line) => line.y && line.y.some((value) => value !== null));
  const figure = el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, title),
    note ? el("p", { class: "note" }, note) : null));
  if (!shown.length) {
    figure.append(el("p", { class: "empty" }, "Not measured in this run."));
    return figure;
  }
  const place = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": described(title, shown) });
  figure.append(place, folded("Numbers", () => numbers(title, shown)));
  whenSized(place, () => plot(place, shown, { height, bound, unit }));
  return figure;
}

/** Call `build` once the element is in the page and has a width. */
function whenSized(place, build) {
  const observer = new ResizeObserver(() => {
    if (!place.isConnected || place.clientWidth < 40) return;
    observer.disconnect();
    build();
  });
  observer.observe(place);
}

function plot(place, lines, { height, bound, unit }) {
  const columns = [];
  const series = [{ label: "step", value: (_, value) => short(value) }];
  const bands = [];
  for (const line of lines) {
    columns.push([line.x, line.y]);
    series.push({
      label: line.label,
      stroke: line.color,
      width: line.width ?? 1.75,
      dash: line.dash,
      points: line.points ? { show: true, size: 6, fill: line.color } : { show: false },
      spanGaps: true,
      value: (_, value) => short(value),
    });
    if (!line.low) continue;
    const ends = series.length;
    for (const end of [line.high, line.low]) {
      columns.push([line.x, end]);
      series.push({ stroke: "transparent", points: { show: false }, spanGaps: true, class: "band" });
    }
    bands.push({ series: [ends, ends + 1], fill: faded(line.color) });
  }
  const data = uPlot.join(columns);
  const axis = {
    stroke: color("muted"),
    font: "11px system-ui, sans-serif",
    grid: { stroke: color("grid"), width: 1 },
    ticks: { show: false },
  };
  const options = {
    width: place.clientWidth,
    height,
    series,
    bands,
    axes: [
      { ...axis, size: 28, grid: { show: false }, values: (_, ticks) => ticks.map((tick) => Number.isInteger(tick) ? short(tick) : "") },
      { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => short(tick) + unit) },
    ],
    scales: { x: { time: false }, y: { range: (_, low, high) => range(low, high, bound) } },
    cursor: { sync: { key: SYNC.key }, focus: { prox: 24 }, points: { size: 6 } },
    legend: { live: true, markers: { fill: (_, i) => series[i].stroke } },
    padding: [10, 16, 0, 0],
    hooks: { draw: bound ? [(u) => drawBound(u, bound)] : [], ready: [latest] },
  };
  const u = new uPlot(options, data, place);
  place.addEventListener("mouseleave", () => latest(u));
  new ResizeObserver(() => {
    if (place.clientWidth > 40) u.setSize({ width: place.clientWidth, height });
  }).observe(place);
  place.addEventListener("keydown", (event) => onKey(event, u));
}

/** Show the values of the last step in the legend, unless the cursor is in the chart. */
function latest(u) {
  u.setLegend({ idx: u.data[0].length - 1 });
}

function range(low, high, bound) {
  if (low === null || high === null) return [0, 1];
  if (bound) [low, high] = [Math.min(low, bound.value), Math.max(high, bound.value)];
  const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 0.5;
  return [low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
}

function drawBound(u, bound) {
  const y = u.valToPos(bound.value, "y", true);
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = color("bad");
  ctx.setLineDash([6, 4]);
  ctx.lineWidth = devicePixelRatio;
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "right";
  ctx.fillText(bound.label, bbox.left + bbox.width, y - 4 * devicePixelRatio);
  ctx.restore();
}

/** Move the cursor with the arrow keys; Escape shows the whole range again. */
function onKey(event, u) {
  const x = u.data[0];
  const moves = { ArrowRight: 1, ArrowLeft: -1, PageDown: 10, PageUp: -10, Home: -x.length, End: x.length };
  if (event.key === "Escape") u.setScale("x", { min: x[0], max: x[x.length - 1] });
  if (!(event.key in moves)) return;
  event.preventDefault();
  const from = u.cursor.idx ?? (event.key === "ArrowLeft" ? x.length : -1);
  const to = Math.min(x.length - 1, Math.max(0, from + moves[event.key]));
  u.setCursor({ left: u.valToPos(x[to], "x"), top: u.bbox.height / devicePixelRatio / 2 });
}

function faded(stroke) {
  return `color-mix(in srgb, ${stroke} 18%, transparent)`;
}

function described(title, lines) {
  const parts = lines.map((line) => {
    const known = line.y.filter((value) => value !== null);
    return `${line.label}: from ${short(known[0])} to ${short(known[known.length - 1])}, ` +
      `lowest ${short(Math.min(...known))}, highest ${short(Math.max(...known))}`;
  });
  return `Chart of ${title}. ${parts.join(". ")}. Arrow keys read single steps.`;
}

/** Return a table of at most TABLE_ROWS steps, spread evenly. */
function numbers(title, lines) {
  const [steps, ...columns] = uPlot.join(lines.map((line) => [line.x, line.y]));
  const stride = Math.max(1, Math.ceil(steps.length / TABLE_ROWS));
  const rows = [];
  for (let i = 0; i < steps.length; i += stride) {
    rows.push([short(steps[i]), ...columns.map((column) => short(column[i]))]);
  }
  return table(`Numbers of ${title}`,
    [{ title: "step", number: true }, ...lines.map((line) => ({ title: line.label, number: true }))], rows);
}

/** Return a chart of counts: [[value, count], ...], with a bound drawn after the value `bound`. */
function histogram(title, counts, bound, note) {
  const most = Math.max(1, ...counts.map(([, count]) => count));
  const total = counts.reduce((sum, [, count]) => sum + count, 0);
  const last = Math.max(bound ?? 0, ...counts.map(([value]) => value));
  const found = new Map(counts);
  const bars = [];
  const values = last <= MOST_BARS ? [...Array(last + 1).keys()] : counts.map(([value]) => value);
  for (const value of values) {
    const count = found.get(value) ?? 0;
    const bar = el("div", { class: value > (bound ?? last) ? "bar over" : "bar" });
    bar.style.height = `${(100 * count) / most}%`;
    bars.push(el("div", { class: value === bound ? "column bound" : "column" },
      el("span", { class: "count" }, short(count)), el("div", { class: "tower" }, bar), el("span", {}, value)));
  }
  return el("figure", { class: "chart" },
    el("figcaption", {}, el("h3", {}, title), el("p", { class: "note" }, note)),
    counts.length
      ? el("div", { class: "histogram", role: "img", "aria-label": `${title}: ` +
        counts.map(([value, count]) => `${value}: ${count} of ${total}`).join(", ") +
        (bound === null ? "" : `. Bound: ${bound}`) }, bars)
      : el("p", { class: "empty" }, "No group was trained."));
}
