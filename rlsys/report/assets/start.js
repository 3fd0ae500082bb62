// Builds the page from the model in it, and keeps a live page up to date.

const POLL_MS = 2000;

const main = document.querySelector("main");
const shown = new Map(); // id of a section -> JSON of the model that it shows

function sectionKey(id, model) {
  if (id === "groups") {
    const run = model.runs[chosenRun];
    return `${chosenRun} ${run.groups.length} ${run.groups.at(-1)?.step} ${run.dropped.length}`;
  }
  return JSON.stringify([chosenRun, model.runs.map((run) => [run.state, run.facts, run.advisories, run.num_damaged])]);
}

function build(id, title, fill, model) {
  const isNamed = id !== "overview";
  const heading = isNamed ? el("h2", {}, el("a", { href: `#${id}` }, title),
    model.runs.length > 1 && ABOUT_ONE_RUN.has(id) ? el("span", { class: "muted" }, ` ${model.runs[chosenRun].name}`) : null) : null;
  return el("section", { id, "aria-label": title }, heading, fill(model));
}

/** Show the sections one after the other, so that the first one is painted at once. */
function render(model) {
  document.title = `${model.runs.map((run) => run.name).join(", ")} · rlsys report`;
  const remaining = [...SECTIONS];
  const next = () => {
    const [id, title, fill] = remaining.shift();
    const key = sectionKey(id, model);
    const present = document.getElementById(id);
    if (shown.get(id) !== key && !(present && isUsed(present))) {
      const built = build(id, title, fill, model);
      if (present) present.replaceWith(built);
      else main.append(built);
      shown.set(id, key);
    }
    if (remaining.length) setTimeout(next, 0);
    else main.setAttribute("aria-busy", "false");
  };
  next();
}

/** Return whether the user is working in a section, which is then updated later. */
function isUsed(section) {
  return section.contains(document.activeElement) || section.matches(":hover");
}

function navigation(model) {
  const links = SECTIONS.map(([id, title]) => el("a", { href: `#${id}` }, title));
  const picker = model.runs.length > 1 ? el("label", {}, "Run ", el("select", {
    onchange: (event) => {
      chosenRun = Number(event.target.value);
      event.target.blur();
      groupsView.open = null;
      shown.clear();
      render(model);
    },
  }, model.runs.map((run, i) => el("option", { value: i }, run.name)))) : null;
  document.querySelector("nav").replaceChildren(...links, ...(picker ? [picker] : []));
  document.querySelector("footer").replaceChildren(
    `Written ${clock(model.written_unix_s)} from ${model.runs.map((run) => run.path).join(", ")}. ` +
    "Drag in a chart to zoom, double-click to show all.");
}

let model = JSON.parse(document.getElementById("model").textContent);
navigation(model);
render(model);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  KIND_COLORS.clear();
  shown.clear();
  render(model);
});

if (model.live) {
  const live = el("span", { class: "live", role: "status" }, "live");
  document.querySelector("nav").append(live);
  let tag = null;
  setInterval(async () => {
    try {
      const answer = await fetch("model.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      live.textContent = "live";
      if (answer.status === 304) return;
      if (!answer.ok) {
        live.textContent = "the run cannot be read";
        return;
      }
      tag = answer.headers.get("ETag");
      model = await answer.json();
      navigation(model);
      document.querySelector("nav").append(live);
      render(model);
    } catch {
      live.textContent = "the server has ended";
    }
  }, POLL_MS);
}
