// The eight sections of the page. Each is a function from the model to an element.

/** The run that the sections about a single run show; others are overlaid in the charts. */
let chosenRun = 0;

const SECTIONS = [
  ["overview", "Overview", overview],
  ["reward", "Reward", reward],
  ["stability", "Stability", stability],
  ["time", "Time", time],
  ["groups", "Groups", (model) => groups(model.runs[chosenRun])],
  ["ledger", "Ledger", (model) => funnel(model.runs[chosenRun])],
  ["events", "Events", (model) => events(model.runs[chosenRun])],
  ["configuration", "Configuration", configuration],
];

const ABOUT_ONE_RUN = new Set(["time", "groups", "ledger", "events"]);

const SHOWN_FACTS = ["model", "layout", "generation", "staleness bound", "batch", "git revision"];

function overview(model) {
  return el("div", { class: "overview" }, model.runs.map((run, i) => el("article", { class: "run" },
    el("header", {},
      model.runs.length > 1 ? swatch(COLORS[i]) : null,
      el("h1", {}, run.name), el("span", { class: `state ${run.state.state}` }, run.state.state),
      el("span", { class: "muted" }, run.state.text)),
    el("p", { class: "note" }, run.header.filter(([name]) => SHOWN_FACTS.includes(name))
      .map(([name, value]) => `${name} ${name === "git revision" ? value.slice(0, 10) : value}`).join(" · ")),
    run.state.reason ? el("pre", { class: "reason" }, run.state.reason) : null,
    el("dl", { class: "facts" }, run.facts.map((fact) => el("div", {}, el("dt", {}, fact.label),
      el("dd", {}, fact.value), fact.note ? el("dd", { class: "note" }, fact.note) : null))),
    damages(run), advisories(run),
    folded("Model, layout, hardware, versions", () => table("Facts", [{ title: "fact" }, { title: "value" }], run.header),
      { open: false }),
    run.left_out.length ? folded("Not on this page", () => el("ul", {}, run.left_out.map((note) => el("li", {}, note)))) : null)));
}

function advisories(run) {
  if (!run.advisories.length) {
    return el("p", { class: "fine" }, "No advisory: no rule has found a problem in the last steps.");
  }
  return el("ul", { class: "advisories", "aria-label": "Advisories" }, run.advisories.map((one) =>
    el("li", { class: one.level, "data-kind": one.kind },
      el("strong", {}, one.title), el("p", {}, `${one.cause} `, el("span", { class: "fix" }, one.fix)),
      folded(`About: ${one.link}`, () => el("p", { class: "note" }, one.about)))));
}

function damages(run) {
  if (!run.num_damaged) return null;
  const count = run.num_damaged === 1 ? "1 damaged line is" : `${run.num_damaged} damaged lines are`;
  return el("div", { class: "damage", role: "alert" }, el("strong", {}, `${count} left out`),
    el("ul", {}, run.damages.map((one) =>
      el("li", {}, one.line ? `${one.file}, line ${one.line}: ${one.fault}` : `${one.file}: ${one.fault}`))));
}

/** Return the lines of a metric, one per run. */
function metricLines(model, name, options = {}) {
  return model.runs.map((run, i) => ({
    label: model.runs.length > 1 ? run.name : options.label ?? name,
    x: run.curves.steps,
    y: run.curves.series[name],
    color: color(COLORS[options.color ?? i]),
    ...options.line,
  }));
}

function reward(model) {
  const lines = [];
  model.runs.forEach((run, i) => {
    const { steps, series } = run.curves;
    const prefix = model.runs.length > 1 ? `${run.name}: ` : "";
    const stroke = color(COLORS[i]);
    if (model.runs.length === 1) {
      lines.push({ label: "each step", x: steps, y: series["reward/mean"], color: faded(stroke), width: 1 });
    }
    lines.push({
      label: `${prefix}reward`, x: steps, y: series["page/reward"], color: stroke, width: 2,
      low: series["page/reward_low"], high: series["page/reward_high"],
    });
    const scored = heldOut(run);
    if (scored) {
      lines.push({
        label: `${prefix}held-out ${scored.name}`, x: scored.steps, y: scored.value, points: true, width: 1.5,
        color: color(model.runs.length > 1 ? COLORS[i] : "c2"), dash: [5, 3], low: scored.low, high: scored.high,
      });
    }
  });
  const figures = [chart("Reward and held-out score", lines, {
    height: 270, note: "Smoothed mean with its 95 % band; held-out scores with their 95 % intervals.",
  })];
  model.runs.forEach((run, i) => figures.push(forecast(run, i, model.runs.length > 1)));
  const others = ["preference/accuracy", "eval"].filter((name) => model.runs.some((run) => run.curves.series[name]));
  for (const name of others) figures.push(chart(name, metricLines(model, name)));
  return el("div", { class: "charts wide" }, figures, evaluations(model));
}

function heldOut(run) {
  const name = run.evaluations.flatMap((line) => Object.keys(line)).find((key) => /^eval\/mean@\d+$/.test(key));
  if (!name) return null;
  const column = (key) => run.evaluations.map((line) => line[key] ?? null);
  return {
    name: name.slice(5), steps: column("step"), value: column(name),
    low: column(`${name}/low`), high: column(`${name}/high`),
  };
}

function forecast(run, i, isNamed) {
  const { text: note, steps, value, low, high, warnings } = run.forecast;
  const title = isNamed ? `Forecast of ${run.name}` : "Forecast";
  if (!steps) return el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, title)), el("p", { class: "empty" }, note));
  const stroke = color(COLORS[i]);
  const figure = chart(title, [
    { label: "each step", x: run.curves.steps, y: run.curves.series["reward/mean"], color: faded(stroke), width: 1 },
    { label: "fit", x: steps, y: value, color: stroke, dash: [6, 3], low, high },
  ], { height: 270, note });
  for (const warning of warnings) figure.append(el("p", { class: "note" }, `Warning: ${warning}`));
  return figure;
}

function evaluations(model) {
  const rows = model.runs.flatMap((run) => run.evaluations.map((line) => [run, line]));
  if (!rows.length) return null;
  const names = [...new Set(rows.flatMap(([, line]) => Object.keys(line)))]
    .filter((name) => name !== "step" && !/\/(low|high)$/.test(name));
  return folded(`Evaluations (${rows.length})`, () => table("Evaluations",
    [{ title: "run" }, { title: "step", number: true }, ...names.map((name) => ({ title: name.replace("eval/", ""), number: true }))],
    rows.map(([run, line]) => [run.name, short(line.step), ...names.map((name) =>
      `${`${name}/low`}` in line ? `${short(line[name])} (${short(line[`${name}/low`])}–${short(line[`${name}/high`])})` : short(line[name]))])));
}

function stability(model) {
  const clip = model.runs.some((one) => one.curves.series["ratio/clipped_frac"]) ? "ratio/clipped_frac" : "ratio/masked_frac";
  return el("div", { class: "charts" },
    chart("Entropy", metricLines(model, "entropy"), { note: "nats per token" }),
    chart("Sampler–trainer gap", metricLines(model, "kl/sampler_trainer"), { note: "kl/sampler_trainer, nats per token" }),
    chart("Gradient norm", metricLines(model, "grad_norm"), { note: "before clipping" }),
    chart("Clip share", metricLines(model, clip), { note: `${clip}, share of tokens` }),
    chart("Groups without a signal", metricLines(model, "groups/zero_advantage_frac"), { note: "share with equal rewards" }),
    model.runs.map((run) => staleness(run, model.runs.length > 1)),
    anyMetric(model));
}

function staleness(run, isNamed) {
  const { groups, bound } = run.staleness;
  const counts = Object.entries(groups).map(([value, count]) => [Number(value), count]);
  const note = "trained groups by age of their oldest token, in steps" + (bound === null ? "" : `; the bound is ${bound}`);
  return histogram(isNamed ? `Staleness of ${run.name}` : "Staleness", counts, bound, note);
}

let chosenMetric = "completion/tokens_mean";

/** Return a chart of a metric that the user chooses. */
function anyMetric(model) {
  const names = [...new Set(model.runs.flatMap((run) => Object.keys(run.curves.series)))]
    .filter((name) => !name.startsWith("page/")).sort();
  if (!names.length) return null;
  if (!names.includes(chosenMetric)) [chosenMetric] = names;
  const place = el("div", { class: "any" });
  const show = () => place.replaceChildren(chart(chosenMetric, metricLines(model, chosenMetric)));
  const select = el("select", { onchange: (event) => { chosenMetric = event.target.value; show(); } },
    names.map((name) => el("option", { value: name, selected: name === chosenMetric }, name)));
  show();
  return el("div", { class: "chooser" }, el("label", {}, "Any metric ", select), place);
}

function time(model) {
  const run = model.runs[chosenRun];
  const { actors, stages, totals } = run.shares;
  return el("div", {},
    timeline(run.timeline, run.origin_unix_s),
    el("div", { class: "charts" },
      el("div", {}, el("h3", {}, "Actors"), actors.length ? table("Work of the actors",
        [{ title: "actor" }, { title: "busy" }, { title: "work", number: true }, { title: "idle", number: true }],
        actors.map((one) => [one.name, meter(one.work, one.work + one.wait), seconds(one.work), share(one.wait, one.work + one.wait)]))
        : el("p", { class: "empty" }, "Not measured.")),
      el("div", {}, el("h3", {}, "Where the steps went"), table("Sums over the run",
        [{ title: "part" }, { title: "time", number: true }, { title: "share", number: true }],
        totals.map((one) => [one.name, seconds(one.wait), share(one.wait, totals[0].wait)]))),
      el("div", {}, el("h3", {}, "Waiting of the controller's loops"), stages.length ? table("Waiting by reason",
        [{ title: "loop and reason" }, { title: "time", number: true }],
        [...stages].sort((a, b) => b.wait - a.wait).map((one) => [one.name, seconds(one.wait)]))
        : el("p", { class: "empty" }, "Not measured."))));
}

function share(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)}%` : "–";
}

function meter(part, whole) {
  const fill = el("i");
  fill.style.width = whole ? `${(100 * part) / whole}%` : "0";
  return el("span", { class: "meter", role: "img", "aria-label": share(part, whole) }, fill);
}

function funnel(run) {
  const { stages, open, reissued, skipped } = run.funnel;
  const most = Math.max(1, stages[0].groups);
  const bars = stages.map((stage) => {
    const bar = el("i");
    bar.style.width = `${(100 * stage.groups) / most}%`;
    const lost = Object.entries(stage.lost).map(([reason, count]) => el("span", { class: "lost" }, `− ${short(count)} ${reason}`));
    return el("li", {}, el("span", { class: "stage" }, stage.name), el("span", { class: "funnel-bar" }, bar),
      el("strong", {}, short(stage.groups)), lost.length ? el("span", { class: "losses" }, lost) : null);
  });
  const rollouts = run.group_size > 1 ? ` Each group has ${run.group_size} rollouts.` : "";
  const notes = [`${counted(open, "group")} ${open === 1 ? "has" : "have"} not ended.`,
    reissued ? `${counted(reissued, "time")} a group was sampled again.` : "",
    skipped ? `${counted(skipped, "prompt")} ${skipped === 1 ? "was" : "were"} skipped.` : ""].filter(Boolean).join(" ");
  return el("div", {},
    el("p", { class: "note" }, `Every group of rollouts that was issued, and where it ended.${rollouts} ${notes}`),
    el("ol", { class: "funnel" }, bars),
    folded("Numbers", () => table("The ledger by stage", [{ title: "stage" }, { title: "groups", number: true }, { title: "lost after it" }],
      stages.map((stage) => [stage.name, short(stage.groups),
        Object.entries(stage.lost).map(([reason, count]) => `${reason}: ${count}`).join(", ") || "none"]))));
}

function events(run) {
  if (!run.events.length) return el("p", { class: "empty" }, "No death, restart or resume was recorded.");
  return table("Events", [{ title: "time" }, { title: "event" }, { title: "detail" }, { title: "cost", number: true }],
    run.events.map((one) => [clock(one.unix_s), one.fault ? el("strong", { class: "fault" }, one.name) : one.name,
      one.detail, seconds(one.cost_s)]), { class: "events" });
}

let showsAllFields = false;

function configuration(model) {
  const run = model.runs[chosenRun];
  const parts = [];
  if (model.runs.length > 1) {
    parts.push(el("h3", {}, "Differences between the runs"), model.differences.length
      ? table("Differences between the runs", [{ title: "field" }, ...model.runs.map((one) => ({ title: one.name }))],
        model.differences.map((row) => [row.field, ...row.values]), { class: "config" })
      : el("p", { class: "empty" }, "The configurations are equal."), model.num_differences > model.differences.length
      ? el("p", { class: "note" }, `${short(model.differences.length)} of ${short(model.num_differences)} differences are shown.`) : null,
      el("h3", {}, `Configuration of ${run.name}`));
  }
  const place = el("div");
  const show = () => place.replaceChildren(table("Configuration", [{ title: "field" }, { title: "value" }, { title: "default" }],
    run.config.filter((row) => showsAllFields || row.changed)
      .map((row) => [row.field, row.value, row.changed ? row.default.replace("unset", "set by the recipe") : row.default]), { class: "config" }));
  const box = el("input", { type: "checkbox", onchange: () => { showsAllFields = box.checked; show(); } });
  box.checked = showsAllFields;
  show();
  return el("div", {}, parts, el("label", { class: "note" }, box, " also fields that have their default"), place);
}
