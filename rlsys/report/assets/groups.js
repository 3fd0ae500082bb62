// Groups of rollouts: a sortable table, and the completions of one group side by side.

const PAGE_ROWS = 15;
const PROMPT_CHARACTERS = 90;
const PAINTS = [ // name, title, legend
  ["version", "weight version", "green: the newest one; orange: older ones"],
  ["gap", "log-probability gap", "orange: more probable at the sampler; blue: at the trainer"],
  ["advantage", "advantage", "blue: positive; red: negative"],
  ["none", "no colour", ""],
];
const LEAST_GAP = 0.01; // nats that get the full colour at least

/** The sort order, the page and the open group, which survive an update of a live page. */
const groupsView = { column: "step", descending: true, page: 0, query: "", open: null, paint: "version" };

function groupRows(run) {
  const rows = run.groups.map((group) => {
    const rewards = group.rollouts.map((one) => one.reward);
    return {
      key: `${group.step}/${group.group}`,
      step: group.step,
      group: group.group,
      prompt: group.rollouts[0]?.prompt ?? "",
      reward: mean(rewards),
      best: Math.max(...rewards.filter((value) => value !== null)),
      length: mean(group.rollouts.map((one) => one.num_tokens)),
      staleness: Math.max(...group.rollouts.map((one) => one.staleness ?? 0)),
      reason: reasons(group.rollouts.map((one) => one.finish)),
      rollouts: group.rollouts,
      num_hidden: group.num_hidden ?? 0,
    };
  });
  for (const one of run.dropped) {
    rows.push({
      key: `dropped/${one.group}`, step: one.step, group: one.group, prompt: `prompt ${one.prompt}`,
      reward: null, best: null, length: null, staleness: null, reason: `dropped: ${one.reason}`, rollouts: null,
    });
  }
  return rows;
}

function reasons(list) {
  const counts = new Map();
  for (const one of list) counts.set(one, (counts.get(one) ?? 0) + 1);
  return [...counts].map(([reason, count]) => counts.size > 1 ? `${reason} ${count}` : reason).join(", ");
}

const GROUP_COLUMNS = [
  { name: "step", title: "step", number: true },
  { name: "group", title: "group", number: true },
  { name: "prompt", title: "prompt" },
  { name: "reward", title: "reward", number: true },
  { name: "best", title: "best", number: true },
  { name: "length", title: "tokens", number: true },
  { name: "staleness", title: "stale", number: true },
  { name: "reason", title: "ended" },
];

function groups(run) {
  const rows = groupRows(run);
  const body = el("tbody");
  const count = el("output", { class: "status", "aria-live": "polite" });
  const detail = el("div", { class: "detail" });
  const headings = GROUP_COLUMNS.map((column) => el("th", { scope: "col", class: column.number ? "number" : null },
    button(column.title, () => {
      groupsView.descending = groupsView.column === column.name ? !groupsView.descending : Boolean(column.number);
      groupsView.column = column.name;
      groupsView.page = 0;
      fill();
    }, `Sort by ${column.title}`)));
  const search = el("input", {
    type: "search", placeholder: "Search prompts and completions", "aria-label": "Search prompts and completions",
    value: groupsView.query, oninput: (event) => {
      groupsView.query = event.target.value;
      groupsView.page = 0;
      fill();
    },
  });

  function found() {
    const query = groupsView.query.toLowerCase();
    const { column, descending } = groupsView;
    const matching = query ? rows.filter((row) => text(row).includes(query)) : [...rows];
    return matching.sort((a, b) => {
      const order = compare(a[column], b[column]) || compare(a.step, b.step) || compare(a.group, b.group);
      return descending ? -order : order;
    });
  }

  function fill() {
    const all = found();
    const pages = Math.max(1, Math.ceil(all.length / PAGE_ROWS));
    groupsView.page = Math.min(pages - 1, Math.max(0, groupsView.page));
    const start = groupsView.page * PAGE_ROWS;
    count.textContent = all.length
      ? `${start + 1}–${Math.min(all.length, start + PAGE_ROWS)} of ${all.length}` : "no group";
    headings.forEach((heading, i) => {
      const isSorted = GROUP_COLUMNS[i].name === groupsView.column;
      if (isSorted) heading.setAttribute("aria-sort", groupsView.descending ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    });
    body.replaceChildren(...all.slice(start, start + PAGE_ROWS).map(row));
  }

  function row(entry) {
    const isOpen = entry.key === groupsView.open;
    const label = entry.prompt.slice(0, PROMPT_CHARACTERS) || "(empty)";
    const opener = entry.rollouts
      ? el("button", { type: "button", class: "link", "aria-expanded": String(isOpen), onclick: () => open(entry) }, label)
      : el("span", { class: "muted" }, label);
    const cells = { ...entry, prompt: opener };
    return el("tr", { class: isOpen ? "open" : null }, GROUP_COLUMNS.map((column) =>
      el("td", { class: column.number ? "number" : column.name === "prompt" ? "prompt" : null },
        column.name === "prompt" || column.name === "reason" ? cells[column.name] : short(cells[column.name]))));
  }

  function open(entry) {
    groupsView.open = groupsView.open === entry.key ? null : entry.key;
    fill();
    detail.replaceChildren(...(groupsView.open ? [groupDetail(entry)] : []));
  }

  function turn(by) {
    groupsView.page += by;
    fill();
  }

  fill();
  const opened = rows.find((entry) => entry.key === groupsView.open && entry.rollouts)
    ?? rows.filter((entry) => entry.rollouts).at(-1);
  if (opened) {
    groupsView.open = null;
    open(opened);
  }
  return el("div", {},
    el("div", { class: "tools" }, search, button("◀", () => turn(-1), "Previous page"),
      button("▶", () => turn(1), "Next page"), count),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Groups" },
      el("table", { class: "groups" }, el("caption", { class: "hidden" }, "Groups of rollouts"),
        el("thead", {}, el("tr", {}, headings)), body)),
    detail);
}

function text(entry) {
  entry.text ??= [entry.prompt, entry.reason, ...(entry.rollouts ?? []).map((one) => one.completion)]
    .join("\n").toLowerCase();
  return entry.text;
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined || a === -Infinity) return -1;
  if (b === null || b === undefined || b === -Infinity) return 1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}

function groupDetail(entry) {
  const cards = el("div", { class: "cards" });
  const paint = el("select", {
    onchange: (event) => {
      groupsView.paint = event.target.value;
      show();
    },
  }, PAINTS.map(([value, title]) => el("option", { value, selected: groupsView.paint === value }, title)));
  const key = el("span", { class: "note" });
  function show() {
    key.textContent = PAINTS.find(([name]) => name === groupsView.paint)[2];
    cards.replaceChildren(...entry.rollouts.map((rollout) => card(rollout, entry)));
  }
  show();
  const first = entry.rollouts[0];
  return el("section", { class: "group", "aria-label": `Group ${entry.group} of step ${entry.step}` },
    el("div", { class: "tools" }, el("h3", {}, `Step ${entry.step}, group ${entry.group}`),
      el("label", {}, "Tokens coloured by ", paint), key),
    first.turns.length ? null : el("pre", { class: "text given" }, first.prompt),
    first.row ? el("p", { class: "note" }, `Dataset row: ${first.row}`) : null,
    cards,
    entry.num_hidden ? el("p", { class: "note" }, `${short(entry.num_hidden)} more rollouts of this group are in rollouts.jsonl.`) : null);
}

function card(rollout, entry) {
  const parts = Object.entries(rollout.rewards).map(([name, value]) => `${name} ${short(value)}`);
  const facts = [
    `reward ${short(rollout.reward)}`, `advantage ${short(rollout.advantage)}`, counted(rollout.num_tokens, "token"),
    rollout.finish, rollout.staleness ? `${rollout.staleness} stale` : null,
    rollout.is_greedy ? "greedy baseline" : null, rollout.shared_by ? `of run ${rollout.shared_by}` : null,
  ].filter(Boolean);
  return el("article", { class: "card" },
    el("header", {}, el("strong", {}, `#${rollout.index}`), " ", facts.join(" · ")),
    parts.length > 1 ? el("p", { class: "note" }, parts.join(" · ")) : null,
    rollout.turns.length ? conversation(rollout.turns) : el("pre", { class: "text" }, rollout.completion || "(empty)"),
    rollout.tokens.length ? strip(rollout, entry) : null);
}

function conversation(turns) {
  let branch = null;
  const list = el("ol", { class: "turns" });
  for (const turn of turns) {
    const isNew = branch !== null && turn.branch !== branch;
    branch = turn.branch;
    const who = turn.seat ? `${turn.role} (${turn.seat})` : turn.role;
    list.append(el("li", { class: `turn ${turn.sampled ? "sampled" : "given"}` },
      isNew ? el("p", { class: "note" }, `branch ${turn.branch}`) : null,
      el("span", { class: "who" }, who), el("pre", { class: "text" }, turn.text)));
  }
  return list;
}

/** Return the tokens of a rollout, each coloured by what the user has chosen. */
function strip(rollout, entry) {
  const newest = Math.max(...rollout.versions);
  const largest = Math.max(1e-9, ...entry.rollouts.map((one) => Math.abs(one.advantage ?? 0)));
  const widest = entry.rollouts.reduce((most, one) =>
    one.gaps.reduce((found, gap) => Math.max(found, Math.abs(gap ?? 0)), most), LEAST_GAP);
  const tokens = rollout.tokens.map((token, i) => {
    const version = rollout.versions[i];
    const isGiven = version < 0;
    const gap = rollout.gaps[i] ?? null;
    const node = el("span", {
      class: isGiven ? "token given" : "token",
      title: isGiven ? "not sampled, not trained"
        : `version ${version}, log-probability gap ${short(gap)}, advantage ${short(rollout.advantage)}`,
    }, token.replaceAll("\n", "⏎") || "∅");
    if (!isGiven && groupsView.paint === "version") {
      node.style.background = tint(newest - version === 0 ? "c3" : "c2", Math.min(0.75, 0.22 + 0.18 * (newest - version)));
    } else if (groupsView.paint === "gap" && gap !== null) {
      node.style.background = tint(gap >= 0 ? "c2" : "c1", 0.7 * Math.abs(gap) / widest);
    } else if (!isGiven && groupsView.paint === "advantage" && rollout.advantage !== null) {
      node.style.background = tint(rollout.advantage >= 0 ? "c1" : "bad", 0.6 * Math.abs(rollout.advantage) / largest);
    }
    return node;
  });
  if (groupsView.paint === "gap" && !rollout.gaps.length) {
    tokens.push(el("span", { class: "note" }, " (no log-probability gaps were recorded)"));
  }
  const left = rollout.num_tokens - rollout.tokens.length;
  if (left > 0) tokens.push(el("span", { class: "note" }, ` … ${left} more tokens`));
  return el("div", { class: "strip", role: "group", "aria-label": "Tokens" }, tokens);
}

function tint(name, share) {
  return `color-mix(in srgb, ${color(name)} ${Math.round(100 * share)}%, transparent)`;
}
