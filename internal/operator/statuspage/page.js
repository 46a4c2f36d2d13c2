// The page: reads /inventory and /history.json every few seconds and shows them. All text is added as text, never as HTML.

const refresh = 5000, patience = 4000; // ms
const page = {report: null, history: null, error: null, readAt: 0, skew: 0, open: new Set()};

function h(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) element.setAttribute(key, value);
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== ""));
  return element;
}

const byID = (id) => document.getElementById(id);
const plural = (n, one) => n + " " + one + (n === 1 ? "" : "s");
const now = () => Date.now() + page.skew; // by the clock of the agent's node

function duration(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 100) return s + " s";
  if (s < 6000) return Math.round(s / 60) + " min";
  if (s < 48 * 3600) return Math.round(s / 3600) + " h";
  return Math.round(s / 86400) + " days";
}

function since(text) {
  const at = new Date(text), iso = at.toISOString();
  return h("time", {datetime: text}, "since " + iso.slice(0, 10) + " " + iso.slice(11, 16) + ", for " + duration(now() - at));
}

// moment is a time with how far it is from now: "2026-11-27 09:30, 2 h ago".
function moment(text) {
  const at = new Date(text), iso = at.toISOString(), left = at - now();
  return h("time", {datetime: text}, iso.slice(0, 10) + " " + iso.slice(11, 16) + (left > 0 ? ", in " + duration(left) : ", " + duration(-left) + " ago"));
}

function size(bytes) {
  return (bytes / 2 ** 30).toFixed(bytes < 10 * 2 ** 30 ? 1 : 0) + " GiB";
}

function stateMark(state, extra, level) {
  const s = states[state] || states.unknown;
  return h("span", {class: "state " + (level || s.level)}, h("span", {"aria-hidden": "true"}, s.mark + " "), state + (extra || ""));
}

function showVerdict(problems) {
  const devices = page.report.devices, count = {};
  for (const d of devices) count[d.state] = (count[d.state] || 0) + 1;
  const bad = problems.filter((p) => p.level === "bad").length, warn = problems.filter((p) => p.level === "warn").length;
  const level = bad ? "bad" : warn ? "warn" : "good";
  const idle = devices.filter((d) => d.idleSince).length, held = devices.filter((d) => d.owners || d.heldSince).length;
  const takes = devices.filter((d) => d.schedulable).length;
  const title = level === "good" ? "No problem" : plural(bad + warn, "problem");
  const mark = {good: "● ", warn: "▲ ", bad: "✖ "}[level];
  const counts = [plural(devices.length, "device") + " offered", takes + " can take work",
    ...Object.keys(states).filter((s) => s !== "healthy" && count[s]).map((s) => count[s] + " " + s),
    page.report.dra ? plural(page.report.dra.slices, "ResourceSlice") + ", " + plural(page.report.dra.claims.filter((c) => !c.outdated).length, "prepared claim") : "",
    held ? held + " held" : "", idle ? idle + " of them idle" : "",
    page.report.excluded.length ? page.report.excluded.length + " not offered" : ""];
  const models = [...new Set(devices.map((d) => d.model))].join(", ");
  byID("verdict").replaceChildren(h("div", {class: "verdict " + level},
    h("strong", {}, h("span", {"aria-hidden": "true"}, mark), title), h("span", {}, counts.filter((c) => c).join(" · ")), h("span", {class: "dim"}, models)));
  document.title = (level === "good" ? "" : "(" + (bad + warn) + ") ") + byID("node").textContent;
}

function showProblems(problems) {
  const items = problems.map((p) => h("li", {class: p.level},
    h("div", {class: "head"}, h("span", {class: "where"}, p.where), p.state ? stateMark(p.state.split(",")[0], p.state.slice(p.state.split(",")[0].length), p.level === "info" ? "info" : undefined) : "",
      h("span", {}, p.what), p.since ? h("span", {class: "dim"}, since(p.since)) : ""),
    p.facts.length ? h("dl", {}, p.facts.flatMap(([name, text]) => [h("dt", {}, name), h("dd", {class: name === "what to do" ? "do" : ""}, name === "runbook" ? h("a", {href: text}, text.split("/").pop()) : text)])) : ""));
  byID("problems").replaceChildren(...(items.length ? [h("ul", {class: "problems"}, items)] : []));
}

const percent = (v) => Math.round(v) + " %", watts = (v) => Math.round(v) + " W", celsius = (v) => Math.round(v) + " °C";
const mebibytes = (v) => size(v * 2 ** 20);
const kinds = [
  {name: "Utilisation", key: "utilizationPercent", text: percent, top: () => 100, now: (u) => u.gpuPercent},
  {name: "Memory", key: "memoryUsedMiB", text: mebibytes, top: (d) => d.memoryBytes / 2 ** 20, now: (u) => u.memoryUsedBytes === undefined ? undefined : u.memoryUsedBytes / 2 ** 20,
    of: (d) => size(d.memoryBytes)},
  {name: "Power", key: "powerWatts", text: watts, top: (d) => d.usage && d.usage.powerLimitMilliwatts / 1000 || 0, now: (u) => u.powerMilliwatts === undefined ? undefined : u.powerMilliwatts / 1000,
    of: (d) => d.usage && d.usage.powerLimitMilliwatts ? watts(d.usage.powerLimitMilliwatts / 1000) : ""},
  {name: "Temperature", key: "temperatureCelsius", text: celsius, top: () => 100, now: (u) => u.temperatureCelsius},
];

function chartCell(d, kind) {
  const history = page.history.devices.find((each) => each.id === d.id);
  const value = d.usage ? kind.now(d.usage) : undefined;
  const text = value === undefined ? "–" : kind.text(value) + (kind.of && kind.of(d) ? " of " + kind.of(d) : "");
  const values = history ? history[kind.key] : [], step = page.history.stepSeconds * 1000, end = new Date(page.history.at).getTime();
  const time = (i) => new Date(end - (values.length - i) * step).toISOString().slice(11, 16);
  const drawn = values.some((v) => v !== null) ? chart(values, {name: kind.name + " of " + deviceName(d), text: kind.text, top: kind.top(d)}, time) : "";
  return h("td", {class: "chart", role: "cell", "data-label": kind.name}, h("span", {class: "now"}, text), drawn);
}

function deviceCell(d) {
  const processes = (d.processes || []).map((p) => p.pid + (p.name ? " " + p.name : "") + (p.memoryBytes === undefined ? "" : " (" + size(p.memoryBytes) + ")"));
  const facts = [["ID", d.id], ["GPU", d.gpu === d.id ? "" : d.gpu], ["model", d.model], ["serial", d.serial], ["NUMA node", d.numaNode < 0 ? "" : String(d.numaNode)],
    ["NVLinks", d.nvLinks ? String(d.nvLinks) : ""], ["limits", d.healthLimitations], ["processes", processes.join(", ")]];
  const more = h("details", {id: "about-" + d.id}, h("summary", {}, deviceName(d)),
    h("dl", {class: "facts"}, facts.filter(([, text]) => text).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])));
  more.open = page.open.has(d.id);
  more.addEventListener("toggle", () => { if (more.open) page.open.add(d.id); else page.open.delete(d.id); });
  const sharing = d.sharing === "exclusive" ? "" : ", " + d.sharing + " × " + (d.replicas || 1);
  return h("th", {scope: "row", role: "rowheader"}, more, h("span", {class: "dim"}, (d.profile || d.pci) + " · " + d.pool + sharing));
}

function ownerCell(d) {
  const owners = (d.owners || []).map((o) => h("span", {class: "owner"}, ownerName(o)));
  const held = d.heldSince ? h("time", {class: "dim", datetime: d.heldSince}, "held for " + duration(now() - new Date(d.heldSince))) : "";
  const idle = d.idleSince ? [h("span", {class: "dim"}, " · "), h("span", {class: "state warn"}, h("span", {"aria-hidden": "true"}, "▲ "), "idle for " + duration(now() - new Date(d.idleSince)))] : "";
  const u = page.report.ownersUnknown, none = !u ? "–" : "unknown" + (u.remedy ? ": " + u.remedy : "");
  return h("td", {class: "who", role: "cell"}, owners.length || held ? [owners, held, idle] : h("span", {class: "dim", title: u && u.reason}, none));
}

function showDevices() {
  const heads = ["Device", "Health", "Owner", ...kinds.map((k) => k.name)];
  const rows = page.report.devices.map((d) => h("tr", {role: "row", class: levelOf(d)},
    deviceCell(d), h("td", {role: "cell"}, stateMark(d.state, "", levelOf(d)), d.cause ? h("span", {class: "dim owner"}, d.cause) : ""), ownerCell(d), kinds.map((k) => chartCell(d, k))));
  const focus = document.activeElement && document.activeElement.closest("details[id]"), id = focus && focus.id;
  byID("devices").replaceChildren(h("h2", {}, "Devices"), rows.length
    ? h("table", {class: "devices", role: "table"}, h("thead", {role: "rowgroup"}, h("tr", {role: "row"}, heads.map((t) => h("th", {scope: "col", role: "columnheader"}, t)))), h("tbody", {role: "rowgroup"}, rows))
    : h("p", {}, "This agent offers no device."));
  if (id && byID(id)) byID(id).querySelector("summary").focus({preventScroll: true});
}

const dimmed = (...parts) => h("span", {class: "dim owner"}, parts);

// gpuRow is a row about a GPU: cells, and what runs on it or what the next one waits for.
function gpuRow(one, level, cells, next) {
  return h("tr", {role: "row", class: level}, h("th", {scope: "row", role: "rowheader"}, one.index < 0 ? one.gpu : "GPU " + one.index),
    cells.map((c) => h("td", {role: "cell"}, c)),
    h("td", {role: "cell"}, one.running ? [h("span", {class: "state info"}, "runs"), dimmed(since(one.runsSince), ", reason: " + one.running)] : next || waits(one)));
}

function waits(one) {
  return [h("span", {class: "owner"}, one.waits), one.waitsUntil ? dimmed("until ", moment(one.waitsUntil)) : ""];
}

function resultMark([level, mark, text]) {
  return h("span", {class: level === "dim" ? "dim" : "state " + level}, h("span", {"aria-hidden": "true"}, mark), text);
}

// showGPUs shows a table of GPUs; nothing without a row.
function showGPUs(id, title, heads, rows) {
  byID(id).replaceChildren(...(rows.length ? [h("h2", {}, title), h("table", {class: "devices gpus", role: "table"},
    h("thead", {role: "rowgroup"}, h("tr", {role: "row"}, heads.map((t) => h("th", {scope: "col", role: "columnheader"}, t)))), h("tbody", {role: "rowgroup"}, rows))] : []));
}

function proofRow(p) {
  const result = proofResult(p), measured = proofValues(p);
  return gpuRow(p, result[0], [
    [resultMark(result), p.result ? dimmed(moment(p.at), ", after " + duration(p.seconds * 1000) + ", reason: " + p.reason) : "",
      p.couldNotRun ? h("span", {class: "state warn owner"}, h("span", {"aria-hidden": "true"}, "▲ "), "could not run " + plural(p.couldNotRun, "time") + (p.result ? " since" : "")) : ""],
    [p.summary ? h("span", {class: "owner"}, p.summary) : "", measured.length ? dimmed(measured.join(" · ")) : ""]]);
}

function resetRow(r) {
  const result = resetResult(r), tries = resetTries(r);
  const person = r.needsPerson ? h("span", {class: "state warn owner"}, h("span", {"aria-hidden": "true"}, "▲ "), "a person is needed") : "";
  return gpuRow(r, r.needsPerson ? "warn" : result[0], [
    [resultMark(result), r.result ? dimmed(moment(r.at), ", after " + duration((r.seconds || 0) * 1000) + ", reason: " + r.cause) : "", tries ? dimmed(tries) : ""],
    r.text ? h("span", {class: "owner"}, r.text) : ""],
  r.due ? h("span", {class: "owner"}, "would be reset now") : [waits(r), person]);
}

function limitRow(l) {
  const mark = limitMark(l), about = [l.pool, wayText(l.way), l.controlGroup].filter((t) => t).join(" · ");
  return h("tr", {role: "row", class: mark[0]}, h("th", {scope: "row", role: "rowheader"}, l.index < 0 ? l.gpu : "GPU " + l.index),
    [[h("span", {class: "owner"}, ownerName(l.work)), about ? dimmed(about) : ""], [limitText(l), l.wantBytes ? dimmed("by the policy ", size(l.wantBytes), l.required ? ", required" : "") : ""],
      [resultMark(mark), l.since ? dimmed(since(l.since)) : "", l.reason ? h("span", {class: "owner"}, l.reason) : ""]].map((c) => h("td", {role: "cell"}, c)));
}

// showLimits shows the memory limits of work on shared GPUs; nothing without one, by the policy or by another program.
function showLimits() {
  showGPUs("limits", "Memory limits", ["GPU", "Work", "Used of the limit", "State"], (page.report.memoryLimits ? page.report.memoryLimits.shares : []).map(limitRow));
}

// showProofs and showResets show what is known of each GPU; without the sections prove and reset in the configuration there is nothing.
function showProofs() {
  showGPUs("proofs", "Proofs", ["GPU", "Latest proof", "Summary and values", "Next proof"], (page.report.proofs || []).map(proofRow));
}

function showResets() {
  showGPUs("resets", "Resets", ["GPU", "Latest reset", "Text of nvidia-smi", "Next reset"], (page.report.resets || []).map(resetRow));
}

function showMore() {
  const r = page.report, parts = [];
  const part = (title, lines) => {
    if (!lines.length) return;
    const more = h("details", {}, h("summary", {}, title + " (" + lines.length + ")"), h("ul", {}, lines.map((l) => h("li", {}, l))));
    more.open = page.open.has(title);
    more.addEventListener("toggle", () => { if (more.open) page.open.add(title); else page.open.delete(title); });
    parts.push(more);
  };
  part("Dynamic Resource Allocation", draLines(r));
  part("Not offered", r.excluded.map((e) => "GPU " + e.index + " " + (e.id || e.pci || "") + ": " + e.reason));
  part("Events since the history began", r.counts.map((c) => (c.index < 0 ? c.gpu : "GPU " + c.index) + ": " + c.cause + ", " + plural(c.count, "time") + ", last " + c.lastSeen));
  part("How containers get devices", r.injections.map((i) => i.pools.join(", ") + ": " + (i.configured || "") + (i.cdi ? ", CDI" : "") + (i.runtime ? ", NVIDIA's container runtime" : "") + (i.nodes ? ", device nodes" : "")));
  byID("more").replaceChildren(...parts);
}

function showFresh() {
  const old = page.error !== null, element = byID("fresh");
  element.className = old ? "old" : "";
  document.body.classList.toggle("old-content", old && page.report !== null);
  const age = page.readAt ? duration(Date.now() - page.readAt) : "";
  element.textContent = old ? "✖ No answer from the agent" + (age ? " for " + age + ": what is below is old" : "") + " (" + page.error + ")" : "";
}

function show() {
  const d = page.report.driver, problems = problemsOf(page.report, page.history.agent);
  byID("node").textContent = page.history.node;
  byID("about").textContent = page.history.agent + " " + page.history.version + " · driver " + (d.version || d.state) + (d.cuda ? " · CUDA " + d.cuda : "");
  showVerdict(problems);
  showProblems(problems);
  showDevices();
  showLimits();
  showProofs();
  showResets();
  showMore();
  byID("server").textContent = "As of " + new Date(page.history.at).toISOString().slice(11, 19) + ".";
}

async function get(path) {
  const response = await fetch(path, {cache: "no-store", signal: AbortSignal.timeout(patience)}); // also for the body
  if (!response.ok) throw new Error(path + ": " + response.status);
  return response.json();
}

async function read() {
  try {
    [page.report, page.history] = await Promise.all([get("/inventory"), get("/history.json")]);
    page.skew = new Date(page.history.at).getTime() - Date.now();
    page.readAt = Date.now();
    page.error = null;
  } catch (e) {
    page.error = e.message;
  }
  if (page.error === null) show();
  showFresh();
  document.body.dataset.read = page.error === null ? "yes" : "no"; // for tests
}

async function run() {
  for (;;) {
    if (document.visibilityState === "visible") await read();
    await new Promise((done) => setTimeout(done, refresh));
  }
}

document.addEventListener("pointermove", followPointer);
document.addEventListener("visibilitychange", () => { if (document.visibilityState === "visible") read(); });
run();
