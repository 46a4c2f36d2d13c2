// The page: reads /fleet.json every few seconds and shows it. All text is added as text, never as HTML.

const refresh = 5000, patience = 8000, oldAfter = 60000; // ms
const step = 100; // rows that a table has at first, and that are added on demand
const page = {doc: null, tag: null, from: null, error: null, readAt: 0, skew: 0, open: new Set(), rows: {}, words: [], reading: null};

function h(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(key, value);
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== ""));
  return element;
}

const byID = (id) => document.getElementById(id);
const plural = (n, one) => n + " " + one + (n === 1 ? "" : "s");
const now = () => Date.now() + page.skew; // by the clock of the server
const levels = {healthy: "good", degraded: "warn", unknown: "bad", unhealthy: "bad", lost: "bad"};
const marks = {good: "●", warn: "▲", bad: "✖"};

function duration(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 100) return s + " s";
  if (s < 6000) return Math.round(s / 60) + " min";
  if (s < 48 * 3600) return Math.round(s / 3600) + " h";
  return Math.round(s / 86400) + " days";
}

// stamp is a time to the second, without the date if it is today's.
function stamp(text) {
  const iso = new Date(text).toISOString(), today = new Date(now()).toISOString().slice(0, 10);
  return h("time", {datetime: text}, (iso.startsWith(today) ? "" : iso.slice(0, 10) + " ") + iso.slice(11, 19));
}

function stateMark(health) {
  const level = levels[health] || "bad";
  return h("span", {class: "state " + level}, h("span", {"aria-hidden": "true"}, marks[level] + " "), health);
}

// wanted reports whether a row with these texts fits the filter: each word is in it.
function wanted(...texts) {
  if (!page.words.length) return true;
  const all = texts.flat(Infinity).join(" ").toLowerCase();
  return page.words.every((w) => all.includes(w));
}

// table returns a table under a title; without rows nothing. A row is a list of cells, or makes it; the first is its header.
function table(title, heads, rows) {
  if (!rows.length) return [];
  const most = page.rows[title] || step, left = rows.length - most;
  const cells = (row) => (typeof row === "function" ? row() : row).map((c, i) => i === 0 ? h("th", {scope: "row"}, c) : c instanceof HTMLTableCellElement ? c : h("td", {}, c));
  const body = h("tbody", {}, rows.slice(0, most).map((row) => h("tr", {}, cells(row))));
  const more = h("button", {type: "button"}, "Show " + Math.min(step, left) + " more of " + left);
  more.addEventListener("click", () => {
    page.rows[title] = most + step;
    show();
  });
  return [h("h2", {}, title + " (" + rows.length + ")"), h("div", {class: "wide", tabindex: "0", role: "region", "aria-label": title},
    h("table", {}, h("thead", {}, h("tr", {}, heads.map((t) => h("th", {scope: "col"}, t)))), body)), ...(left > 0 ? [h("p", {class: "more"}, more)] : [])];
}

const text = (t) => h("td", {class: "text"}, t);
const id = (t) => h("span", {class: "id"}, t);
const place = (s) => [s.cluster, s.node].filter((p) => p).join("/");
const where = (s) => [place(s), s.gpu, s.cause].filter((p) => p).join(" ");
const whereCell = (s) => [place(s), s.gpu ? h("span", {class: "line id"}, s.gpu) : "", s.cause ? h("span", {class: "line"}, s.cause) : ""];
const workName = (w) => [w.namespace, w.name].filter((p) => p).join("/") || w.id;
const workNames = (all) => [...new Set(all.map(workName))];

function faultText(f) {
  const notes = [f.at, f.simulated && "simulated", f.advisory && "reported only", f.unconfirmed && "unconfirmed"].filter((n) => n);
  return f.cause + (notes.length ? " (" + notes.join(", ") + ")" : "") + (f.repair === "none" ? "" : ": " + f.repair) + (f.since ? ", for " + duration(now() - new Date(f.since)) : "");
}

function nodeState(n) {
  return [n.ready ? "" : "not ready", n.draining ? "draining" : "", n.schedulable ? "" : "takes no new work",
    n.mark ? "marked for " + n.mark + (n.markIsOurs ? "" : " by another program or person") : "", ...(n.faults || []).map(faultText)].filter((t) => t);
}

function showVerdict(d) {
  const sum = (key) => d.clusters.reduce((all, c) => all + c[key], 0);
  const level = d.stop || d.alerts.length ? "bad" : sum("faultyGpus") ? "warn" : "good";
  const title = d.stop ? "All acts are stopped" : d.alerts.length ? plural(d.alerts.length, "thing") + (d.alerts.length === 1 ? " needs" : " need") + " a person"
    : sum("faultyGpus") ? plural(sum("faultyGpus"), "faulty GPU") : "No faulty GPU";
  const counts = [plural(sum("nodes"), "node"), plural(sum("gpus"), "GPU"), sum("faultyGpus") + " out of service", sum("heldGpus") + " held",
    plural(d.acts.length, "act") + " due", plural(d.waits.length, "wait"), d.refusals.length + " not moved"];
  byID("verdict").replaceChildren(h("div", {class: "verdict " + level},
    h("strong", {}, h("span", {"aria-hidden": "true"}, marks[level] + " "), title), h("span", {}, counts.join(" · "))));
  document.title = (d.alerts.length ? "(" + d.alerts.length + ") " : "") + "gpu-fleet";
  const order = byID("order");
  order.textContent = d.stop ? "Resume acts…" : "Stop all acts…";
  order.className = d.stop ? "" : "danger";
}

function showAlerts(d) {
  const items = d.alerts.map((a) => h("li", {}, h("span", {class: "code"}, a.code), " ", [where(a), a.name].filter((w) => w).map((w) => [h("span", {class: "where"}, w), " "]),
    a.text, a.since ? h("span", {class: "dim"}, ", since ", stamp(a.since)) : "", a.remedy ? h("span", {class: "do"}, ": " + a.remedy) : ""));
  byID("alerts").replaceChildren(...(items.length ? [h("ul", {class: "alerts"}, items)] : []));
}

function showClusters(d) {
  byID("clusters").replaceChildren(...table("Clusters", ["Cluster", "Kind", "Mode", "Nodes", "GPUs", "Faulty", "Held", "Read", "Problem"], d.clusters.map((c) => [
    c.name, c.kind, c.mode, c.nodes, c.gpus, c.faultyGpus, c.heldGpus, c.mode === "off" ? "–" : c.readAt ? duration(now() - new Date(c.readAt)) + " ago" : "never", text(c.problem || ""),
  ].map((v) => typeof v === "number" ? String(v) : v))));
}

function showFaulty(d) {
  const rows = [];
  for (const n of d.nodes) {
    for (const g of n.gpus) {
      if (g.health === "healthy" && !g.faults) continue;
      const faults = (g.faults || []).map(faultText), names = workNames(g.holders || []);
      if (!wanted(n.cluster, n.name, g.id, g.health, faults, names)) continue;
      rows.push([id(g.id), n.cluster, n.name, stateMark(g.health), faults.map((f) => h("span", {class: "line"}, f)), names.length ? names.map((w) => h("span", {class: "line"}, w)) : h("span", {class: "dim"}, "–")]);
    }
  }
  byID("faulty").replaceChildren(...table("Faulty GPUs", ["GPU", "Cluster", "Node", "Health", "Fault, repair", "Held by"], rows));
}

const waitRows = (all) => all.filter((w) => wanted(w.reason, where(w), w.name || "", w.text)).map((w) => [w.reason, whereCell(w), w.name || "",
  w.alert ? h("span", {class: "state bad"}, "a person acts") : w.until ? stamp(w.until) : "something changes", text(w.text)]);
const refusalRows = (all) => all.filter((r) => wanted(r.reason, where(r), r.name || "", r.text)).map((r) => [r.reason, whereCell(r), r.name || "", text(r.text)]);
const actRows = (all) => all.filter((a) => wanted(where(a), workNames(a.workloads))).map((a) => [workNames(a.workloads).join(", "), whereCell(a),
  (a.listed ? "list only" : "move") + (a.victims ? ", ends " + a.victims + " of lower priority" : "")]);
const markRows = (all) => all.filter((m) => wanted(m.cluster, m.node, m.repair)).map((m) => [m.node, m.cluster,
  (m.repair === "none" ? "remove the mark" : "mark for " + m.repair) + (m.eligible === undefined ? "" : m.eligible ? ", make eligible" : ", make ineligible") + (m.listed ? " (list only)" : "")]);
const freeRows = (all) => all.filter((s) => wanted(where(s))).map((s) => [id(s.gpu), s.cluster, s.node, s.cause]);

// decided are the tables of a decision, or of a plan.
function decided(d, names) {
  return [
    ...table(names.acts, ["Work", "Where", "Act"], actRows(d.acts)),
    ...table("Waits", ["Reason", "Where", "Work", "Until", "Why"], waitRows(d.waits)),
    ...table("Not moved", ["Reason", "Where", "Work", "Why"], refusalRows(d.refusals)),
    ...table(names.marks, ["Node", "Cluster", "Change"], markRows(d.marks)),
    ...table("Faulty and free", ["GPU", "Cluster", "Node", "Cause"], freeRows(d.free)),
  ];
}

function nodeCell(n) {
  const key = n.cluster + "/" + n.name, details = h("details", {id: "node-" + key}, h("summary", {}, n.name));
  const fill = () => { // only of what is open: a large fleet has thousands of GPUs
    if (details.childElementCount === 1) {
      details.append(h("ul", {class: "inner"}, n.gpus.map((g) => h("li", {}, id(g.id), " ", stateMark(g.health), " ", g.kind || (g.devices || []).map((x) => x.kind).join(", "),
        (g.holders || []).map((w) => h("span", {class: "line dim"}, workName(w) + (w.device ? " (" + w.device + ")" : "") + ", " + w.phase))))));
    }
  };
  if (page.open.has(key)) {
    details.open = true;
    fill();
  }
  details.addEventListener("toggle", () => {
    if (details.open) {
      page.open.add(key);
      fill();
    } else page.open.delete(key);
  });
  return details;
}

// gpuMarks has a sign for each GPU; equal ones beside each other are one element.
function gpuMarks(n) {
  const runs = [], count = {};
  for (const g of n.gpus) {
    const level = levels[g.health] || "bad", last = runs[runs.length - 1];
    count[g.health] = (count[g.health] || 0) + 1;
    if (last && last.level === level) last.text += marks[level];
    else runs.push({level, text: marks[level]});
  }
  const label = Object.entries(count).map(([health, c]) => c + " " + health).join(", ");
  return h("span", {class: "gpus", role: "img", "aria-label": label || "no GPU"}, runs.map((r) => h("span", {class: r.level}, r.text)),
    (n.resources || []).map((r) => h("span", {class: "line dim"}, r.kind + ": " + r.held + " of " + r.units + " held")));
}

function showNodes(d) {
  const rows = [], filtered = page.words.length > 0;
  for (const n of d.nodes) {
    if (filtered) {
      if (!wanted(n.cluster, n.name, nodeState(n), n.gpus.map((g) => [g.id, g.health, workNames(g.holders || []), (g.faults || []).map((f) => f.cause)]))) continue;
    } else if (!byID("all").checked && !nodeState(n).length && !n.gpus.some((g) => g.health !== "healthy" || g.faults)) continue;
    rows.push(() => {
      const names = workNames(n.gpus.flatMap((g) => g.holders || [])), state = nodeState(n);
      return [nodeCell(n), n.cluster, state.length ? h("span", {class: "state warn"}, state.join(", ")) : "ready", gpuMarks(n),
        text(names.slice(0, 4).join(", ") + (names.length > 4 ? " and " + (names.length - 4) + " more" : ""))];
    });
  }
  const focus = document.activeElement && document.activeElement.closest("details[id]"), key = focus && focus.id;
  byID("nodes").replaceChildren(...table("Nodes", ["Node", "Cluster", "State", "GPUs", "Held by"], rows),
    ...(d.moreNodes && !filtered ? [h("p", {class: "more"}, plural(d.moreNodes, "node") + " that are ready, without a fault or a mark")] : []));
  if (key && byID(key)) byID(key).querySelector("summary").focus({preventScroll: true});
}

function usedRow(what, u) {
  const share = h("meter", {min: 0, max: u.limit || 1, value: Math.min(u.used, u.limit), high: u.limit * 0.99, optimum: 0, "aria-label": what + " " + (u.of || "") + ": " + u.used + " of " + u.limit});
  return [what, u.of ? id(u.of) : "", h("td", {}, share, " " + u.used + " of " + u.limit), u.listed ? u.listed + " more if listed acts were made" : "", String(u.free)];
}

function showBudget(d) {
  const b = d.budget, l = d.ledger;
  const rows = [usedRow("nodes at a time", b.nodes), ...b.gpus.map((u) => usedRow("GPUs of a node in an hour", u)), ...b.attempts.map((u) => usedRow("attempts of a GPU in a day", u)),
    ...b.quorum.map((u) => usedRow("nodes with one cause", u)), usedRow("rescues in the ledger", b.rescues), usedRow("moves in the ledger", b.moves),
    usedRow("bytes of the ledger", {used: l.bytes, limit: l.limitBytes, free: Math.max(0, l.limitBytes - l.bytes)})];
  byID("budget").replaceChildren(...table("Budget", ["What", "Of", "Used", "Listed", "Free"], rows));
}

function showHistory(d) {
  const rows = [];
  for (const r of d.history) {
    for (const m of r.moves) {
      if (!wanted(where(r), workNames(m.workloads), m.outcome)) continue;
      const took = m.ended && m.accepted && m.outcome === "moved" ? " in " + duration(new Date(m.ended) - new Date(m.accepted)) : "";
      const outcome = r.listed && m.outcome === "open" ? "listed" : m.outcome;
      rows.push([stamp(r.reserved), whereCell(r), workNames(m.workloads).join(", "), h("span", {class: m.outcome === "moved" ? "state good" : ""}, outcome + took),
        text([m.answer, m.remedy].filter((t) => t).join(": "))]);
    }
  }
  byID("history").replaceChildren(...table("History", ["Reserved", "Where", "Work", "Outcome", "Answer"], rows));
}

async function showPlan() {
  if (!byID("plan-details").open) return;
  const mode = byID("plan-mode").value, result = byID("plan-result");
  try {
    const p = await (await get("/plan.json?mode=" + mode)).json(), lines = [p.problem, p.stop ? "All acts are stopped by " + p.stop.by + ": " + p.stop.text : "", p.acts.length ? "" : "No work would be moved now."];
    result.replaceChildren(...lines.filter((l) => l).map((l) => h("p", {}, l)), ...decided(p, {acts: "Would move now", marks: "Would mark now"}));
  } catch (e) {
    result.replaceChildren(h("p", {class: "state bad"}, "No plan: " + e.message));
  }
}

function showFresh() {
  const age = page.doc ? now() - new Date(page.doc.at) : 0, late = page.error === null && age > oldAfter, old = page.error !== null || late, element = byID("fresh");
  element.className = old ? "old" : "";
  document.body.classList.toggle("old-content", old && page.doc !== null);
  const silent = page.readAt ? " for " + duration(Date.now() - page.readAt) + ": what is below is old" : "";
  element.textContent = page.error !== null ? "✖ No answer from gpu-fleet" + silent + " (" + page.error + ")" : !late ? "" : age > 1e12 ? "✖ Nothing was decided yet" : "✖ No decision for " + duration(age) + ": what is below is old";
}

function show() {
  const d = page.doc;
  page.words = byID("filter").value.toLowerCase().split(/\s+/).filter((w) => w);
  byID("tools").hidden = byID("plan-details").hidden = false;
  byID("server").textContent = "As of " + new Date(d.at).toISOString().slice(11, 19) + ", from " + d.identity + ", which " + (d.leads ? "leads" : d.leader ? "follows " + d.leader : "follows no leader: no process is known to lead") + ". Ledger: " + d.ledger.where + ".";
  showVerdict(d);
  showAlerts(d);
  showClusters(d);
  showFaulty(d);
  byID("work").replaceChildren(...decided(d, {acts: "Acts due", marks: "Marks due"}));
  showNodes(d);
  showBudget(d);
  showHistory(d);
}

async function get(path) {
  const response = await fetch(path, {cache: "no-cache", signal: AbortSignal.timeout(patience)}); // also for the body; an unchanged one is the browser's
  if (!response.ok) throw new Error(path + ": " + response.status);
  return response;
}

// path is that of the document: filters and the list of all nodes need the whole one.
function path() {
  return "/fleet.json?nodes=" + (byID("all").checked || byID("filter").value.trim() ? "all" : "brief");
}

// read reads the document and shows it if it is another one.
async function read() {
  try {
    const from = path(), response = await get(from), date = response.headers.get("Date"), tag = from + response.headers.get("ETag");
    if (tag !== page.tag) {
      page.doc = await response.json();
      page.tag = tag;
      page.from = from;
      show();
      await showPlan();
    }
    if (date) page.skew = new Date(date).getTime() - Date.now();
    page.readAt = Date.now();
    page.error = null;
  } catch (e) {
    page.error = e.message;
  }
  showFresh();
  document.body.dataset.read = page.error === null ? "yes" : "no"; // for tests
}

// readNow reads after what is being read.
function readNow() {
  page.reading = (page.reading || Promise.resolve()).then(read);
  return page.reading;
}

async function run() {
  for (;;) {
    if (document.visibilityState === "visible") await readNow();
    await new Promise((done) => setTimeout(done, refresh));
  }
}

// ask opens the dialog for a stop, or for the end of one.
function ask() {
  const stops = !page.doc.stop;
  byID("form").reset();
  byID("dialog").dataset.order = stops ? "stop" : "resume";
  byID("dialog-title").textContent = stops ? "Stop all acts" : "Resume acts";
  byID("dialog-about").textContent = stops ? "No work is moved in any cluster until a person resumes acts." : "Acts are stopped by " + page.doc.stop.by + ": " + page.doc.stop.text;
  byID("dialog-error").textContent = "";
  byID("text-label").hidden = !stops;
  byID("text").required = stops;
  byID("send").textContent = stops ? "Stop" : "Resume";
  byID("dialog").showModal();
}

async function send(event) {
  event.preventDefault();
  const order = byID("dialog").dataset.order, body = {by: byID("by").value};
  if (order === "stop") body.text = byID("text").value;
  byID("dialog-error").textContent = "";
  byID("send").disabled = true;
  try {
    const response = await fetch("/" + order, {method: "POST", body: JSON.stringify(body), headers: {Authorization: "Bearer " + byID("token").value}, signal: AbortSignal.timeout(20000)});
    if (!response.ok) throw new Error((await response.text()).trim());
    byID("dialog").close();
    await readNow();
  } catch (e) {
    byID("dialog-error").textContent = e.message;
  }
  byID("send").disabled = false;
}

function refilter() {
  if (page.doc) show();
  if (page.from !== path()) readNow();
}

byID("filter").addEventListener("input", refilter);
byID("all").addEventListener("change", refilter);
byID("order").addEventListener("click", ask);
byID("form").addEventListener("submit", send);
byID("cancel").addEventListener("click", () => byID("dialog").close());
byID("dialog").addEventListener("close", () => byID("form").reset()); // the token does not stay in the page
byID("plan-details").addEventListener("toggle", showPlan);
byID("plan-mode").addEventListener("change", showPlan);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest("input, select, dialog[open]")) {
    event.preventDefault();
    byID("filter").focus();
  }
});
document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") readNow(); });
run();
