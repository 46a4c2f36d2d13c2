// Problems: what an operator should see first, made from a report (the JSON of /inventory).

const states = {
  healthy: {mark: "●", level: "good"},
  degraded: {mark: "▲", level: "warn"},
  unknown: {mark: "?", level: "bad"},
  unhealthy: {mark: "✖", level: "bad"},
  lost: {mark: "✖", level: "bad"},
};

// levelOf is how bad the state of a device is. One that work holds under a former name, or that is withheld for a proof or a reset, has no fault.
function levelOf(d) {
  return d.cause === "HELD" || d.cause === "PROVING" || d.cause === "RESETTING" ? "info" : (states[d.state] || states.unknown).level;
}

// deviceName is "GPU 3", or "GPU 3:1" for a MIG instance.
function deviceName(d) {
  return "GPU " + d.index + (d.instance === undefined ? "" : ":" + d.instance);
}

// reasonOf is the text of the reason in the line of health: "XID 95 uncontained memory error".
function reasonOf(d) {
  const from = d.health.indexOf(": ");
  return from < 0 ? "" : d.health.slice(from + 2).split(/ since \d|; /)[0];
}

// problemsOf returns the problems of a report, the worst first: {level, state, where, what, cause, since, facts: [[name, text]]}.
function problemsOf(report, agent) {
  const all = [];
  const add = (level, where, what, facts = [], rest = {}) => all.push({level, where, what, facts: facts.filter(([, text]) => text), ...rest});
  const driver = report.driver;
  if (driver.state !== "ready") {
    const advice = driver.state === "pending" ? "" : "run " + agent + " doctor on this node";
    add("bad", "Driver", driver.state, [["reason", driver.reason], ["what to do", advice]]);
  } else if (driver.resetOf) {
    add("info", "Driver", "released for the reset of " + driver.resetOf, [["what to do", "nothing: it ends with the reset"]]);
  }
  for (const e of report.excluded.filter((e) => e.failed && !report.devices.some((d) => d.index === e.index && d.state === "lost"))) {
    add("bad", "GPU " + e.index, "can't be read: " + e.reason, [["what to do", "run " + agent + " doctor on this node"], ["ID", e.id], ["PCI", e.pci]]);
  }
  if (report.dra) for (const [level, where, what] of draProblems(report.dra)) add(level, where, what);
  const shown = new Set();
  for (const p of sickDevices(report, shown, agent)) all.push(p);
  for (const c of report.conditions.filter((c) => !shown.has(c.gpu + c.cause))) {
    if (c.gpu === undefined && driver.state !== "ready") continue;
    const where = c.index < 0 ? c.placement : "GPU " + c.index;
    const effect = withoutEffect(c);
    add(effect ? "info" : states[c.state].level, where, (c.detail || c.cause) + (effect ? " (" + effect + ")" : ""), conditionFacts(c, agent), {cause: c.cause, since: c.since});
  }
  for (const d of report.devices) {
    if (d.missingNodes) add("warn", deviceName(d), "device nodes are missing: " + d.missingNodes.join(", "), [["what to do", d.createNodesCommand]]);
    const strangers = (d.processes || []).filter((p) => p.unreserved);
    if (strangers.length) {
      add("warn", deviceName(d), "in use by processes without a reservation: " + strangers.map((p) => "PID " + p.pid + (p.name ? " " + p.name : "")).join(", "),
        [["what to do", "end the processes, or reserve the GPU for them"]]);
    }
  }
  for (const o of report.overlaps) add("warn", "GPU " + o.index, "also offered by " + o.agent, [["what to do", "give the agents different GPUs"]]);
  for (const u of (report.cdi && report.cdi.undefined) || []) add("warn", nameOf(report, u.id), "no CDI definition: " + u.reason);
  for (const w of report.policyWarnings) add("warn", "Policy", w);
  for (const w of report.warnings || []) add("warn", "Agent", w);
  for (const l of report.healthLimitations || []) add("info", "Agent", "health limited: " + l);
  const order = ["bad", "warn", "info"];
  return all.sort((a, b) => order.indexOf(a.level) - order.indexOf(b.level));
}

// withoutEffect is why a condition has no effect; "" = it has.
function withoutEffect(c) {
  return c.recordedOnly ? "recorded, no effect yet" : c.ignoredUntil || c.ignoredUntilGone ? "ignored by an operator" : "";
}

// sickDevices has one problem for all devices with the same fault of one GPU, or of the node.
function* sickDevices(report, shown, agent) {
  const groups = new Map();
  for (const d of report.devices) {
    if (d.state === "healthy") continue;
    const key = [d.state, d.cause, d.since, d.health].join("\n");
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(d);
  }
  for (const devices of groups.values()) {
    const d = devices[0], condition = report.conditions.find((c) => c.cause === d.cause && (c.gpu === d.gpu || c.gpu === undefined));
    for (const each of devices) shown.add(each.gpu + each.cause);
    if (condition && condition.gpu === undefined) shown.add("undefined" + d.cause);
    const others = report.conditions.filter((c) => c.gpu === d.gpu && c.cause !== d.cause && !withoutEffect(c));
    for (const c of others) shown.add(c.gpu + c.cause);
    const owners = [...new Set(devices.flatMap((each) => (each.owners || []).map(ownerName)))];
    const facts = [["what to do", d.action], ["cleared by", d.clears], ["recovery action", d.recoveryAction], ["progress", condition && progressOf(condition)],
      ["to clear", condition && clearCommand(condition, agent)], ["runbook", runbookOf(d.cause)], ...others.map((c) => ["also", alsoOf(c)]), ["affected", owners.join(", ")], ["ID", devices.length === 1 ? d.id : ""], ["PCI", devices.length === 1 ? d.pci : ""]];
    yield {
      level: levelOf(d), state: d.state + (d.simulated ? ", simulated" : "") + (d.advisory ? ", not enforced" : ""),
      where: placesOf(devices), what: reasonOf(d) || d.cause, cause: d.cause, since: d.since, facts: facts.filter(([, text]) => text),
    };
  }
}

// alsoOf is a condition that another one of its GPU hides, with its own action: what clears that one need not clear it.
function alsoOf(c) {
  return c.cause + (c.detail ? " " + c.detail : "") + (c.action ? "; what to do: " + c.action : "") + (c.clears ? "; cleared by: " + c.clears : "");
}

// placesOf is "GPU 3", "GPU 0, 1, 2" or "GPU 3:0, 3:1".
function placesOf(devices) {
  return "GPU " + [...new Set(devices.map((d) => deviceName(d).slice(4)))].join(", ");
}

function nameOf(report, id) {
  const d = report.devices.find((d) => d.id === id);
  return d ? deviceName(d) : id;
}

// clearCommand is the command that clears a condition when it is repaired; "" for one of the node.
function clearCommand(c, agent) {
  return c.gpu ? agent + " clear --gpu " + c.gpu + " --cause " + c.cause : "";
}

// runbookOf is the document about a cause.
function runbookOf(cause) {
  const documents = "https://github.com/tandem-gpu/tandem/blob/main/docs/";
  return !cause ? "" : documents + (/^XID_/.test(cause) ? "faults.md#xids" : /^EVENT_/.test(cause) ? "faults.md#nvml-events" : "operations.md#causes");
}

function conditionFacts(c, agent) {
  const until = c.ignoredUntil ? "ignored until " + c.ignoredUntil : c.ignoredUntilGone ? "ignored until it is gone" : progressOf(c);
  return [["what to do", c.action], ["cleared by", c.clears], ["progress", until], ["to clear", clearCommand(c, agent)], ["runbook", runbookOf(c.cause)]].filter(([, text]) => text);
}

function progressOf(c) {
  const r = c.recovery;
  return r ? "recovering: " + r.checksPassed + " of " + r.checksRequired + " checks, " + r.secondsElapsed + " of " + r.secondsRequired + " s" : "";
}

function ownerName(o) {
  const name = [o.namespace, o.name, o.container].filter((part) => part).join("/");
  return (name || o.id || "unknown") + (o.claim ? " (claim " + o.claim + ")" : "");
}

// proofResult is the latest result of a proof: its level, mark and text.
function proofResult(p) {
  if (p.result === "passed") return ["good", "● ", "passed"];
  if (p.result === "failed") return ["bad", "✖ ", "failed" + (p.needsService ? ", needs service" : "")];
  return ["dim", "", "no result so far"];
}

// proofValues are what the command of a proof measured: "memory_gbps 2400".
function proofValues(p) {
  return Object.entries(p.values || {}).map(([name, v]) => name + " " + (name.endsWith("_bytes") ? size(v) : String(Number(v.toPrecision(5)))));
}

// resetResult is the latest result of a reset: its level, mark and text.
function resetResult(r) {
  if (!r.result) return ["dim", "", "none so far"];
  return r.result === "done" ? ["good", "● ", "done"] : ["warn", "▲ ", r.result];
}

// resetTries is how often a GPU was reset for its present fault, and was not, because it was in use: "1 attempt, 3 refusals".
function resetTries(r) {
  return [r.attempts ? plural(r.attempts, "attempt") : "", r.refusals ? plural(r.refusals, "refusal") : ""].filter((t) => t).join(", ") + (r.attempts || r.refusals ? " for the present fault" : "");
}

// limitMark is whether a memory limit holds: its level, mark and text. A required one that does not hold is bad, once the work has begun.
function limitMark(l) {
  if (l.state === "limited") return ["good", "● ", "limited"];
  if (l.state === "foreign") return ["dim", "", "set by another program"];
  if (!l.begun) return ["dim", "", l.state + ", not begun"];
  return [l.required ? "bad" : "warn", l.required ? "✖ " : "▲ ", l.state];
}

// limitText is what the driver has: "3.0 GiB of 20 GiB", "3.0 GiB, no limit".
function limitText(l) {
  if (l.usedBytes === undefined) return "not read";
  return size(l.usedBytes) + (l.hardBytes === undefined ? ", no limit" : " of " + size(l.hardBytes));
}

// wayText is what sets a limit.
function wayText(way) {
  return {task: "set by the agent on the task", pod: "set by the agent on the pod", hook: "set by NVIDIA's hook"}[way] || "";
}

// draProblems are those of Dynamic Resource Allocation: [level, where, what]. A server that does not answer leaves the slices as they are.
function draProblems(dra) {
  const all = [];
  if (!dra.registered) all.push(["bad", "DRA driver", "not registered with the kubelet" + (dra.registration ? ": " + dra.registration : "")]);
  if (dra.problem) all.push([dra.slices && !dra.apiReachable ? "warn" : "bad", "ResourceSlices", dra.problem]);
  return all;
}

// draLines are what the agent publishes and has prepared by Dynamic Resource Allocation.
function draLines(report) {
  const dra = report.dra;
  if (!dra) return [];
  const lines = ["driver " + dra.driver + ": " + (dra.registered ? "registered with the kubelet" : "not registered with the kubelet"),
    [plural(dra.slices, "slice") + " with " + plural(dra.published, "device"), dra.generation ? "generation " + dra.generation : "",
      dra.lastWrite ? "last written " + dra.lastWrite : ""].filter((t) => t).join(", ")];
  if (dra.lastError) lines.push("last error of Kubernetes' API at " + dra.lastErrorAt + ": " + dra.lastError);
  for (const c of dra.claims) {
    const devices = c.devices.map((d) => (report.devices.some((x) => x.id === d.id) ? nameOf(report, d.id) : d.device) + (d.adminAccess ? " (admin access)" : ""));
    lines.push("claim " + c.namespace + "/" + c.name + ": " + devices.join(", ") + ", " + (c.state === "complete" ? "prepared" : "being prepared")
      + (c.since ? " since " + c.since : "") + (c.outdated ? ", before the node was started" : ""));
  }
  return lines;
}
