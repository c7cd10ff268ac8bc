// The tables below the graph, and the timeline of a request.

import { get } from "./api.js";
import { element, replicaState } from "./graph.js";

const cell = (text, kind = "") => Object.assign(document.createElement("td"), { textContent: text, className: kind });
const round = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(1));

export function replicas(body, graph) {
  const rows = [];
  for (const role of graph.roles) {
    for (const replica of role.replicas) {
      const state = replicaState(graph.name, replica), held = replica.held || {};
      const row = document.createElement("tr");
      row.className = state;
      row.dataset.place = replica.place;
      const said = state === "down" && replica.state !== "down" ? `died, now ${replica.state}` : replica.state;
      row.append(cell(replica.place), cell(said), cell(held.requests ?? "–", "num"), cell(held.running ?? "–", "num"),
        cell(held.nodes ?? "–", "num"), cell(held.open_numbers ?? "–", "num"), cell(replica.restarts, "num"));
      rows.push(row);
      if (replica.cause && state === "down") {
        const why = document.createElement("tr"), text = cell(replica.cause, "cause");
        text.colSpan = 7;
        why.append(text);
        rows.push(why);
      }
    }
  }
  body.replaceChildren(...rows);
}

export function interfaces(body, graph) {
  body.replaceChildren(...graph.interfaces.map((one) => {
    const row = document.createElement("tr");
    row.append(cell(one.name), cell(round(one.per_s), "num"));
    for (const name of ["wait_p50_ms", "wait_p95_ms", "run_p50_ms", "run_p95_ms"]) row.append(cell(one[name] ? `${round(one[name])} ms` : "–", "num"));
    return row;
  }));
}

const size = (value, unit) => {
  if (unit !== "bytes") return `${value} ${unit}`;
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${(value / 2 ** 20).toFixed(1)} MiB`;
};

export function memory(root, graph) {
  if (!graph.memory) {
    const none = document.createElement("p");
    none.className = "quiet";
    none.textContent = "No memory manager: this graph carries no arrays, or runs in one process.";
    root.replaceChildren(none);
    return;
  }
  const tokens = graph.memory.tokens, found = document.createElement("p");
  found.className = "quiet";
  if (tokens.prompt_tokens) {
    const by = ["l1", "l2", "l3"].map((tier) => `${tokens[tier] ?? 0} in ${tier.toUpperCase()}`).join(", ");
    found.textContent = `Of ${tokens.prompt_tokens} prompt tokens found: ${by}`;
  }
  root.replaceChildren(...graph.memory.tiers.map((tier) => {
    const row = document.createElement("div"), name = document.createElement("span"), said = document.createElement("span");
    row.className = "tier";
    name.textContent = tier.name;
    said.className = "quiet";
    const pool = tier.name.split(" ")[0], level = tier.name.split(" ").pop().toLowerCase();
    const hits = graph.memory.hits[pool]?.[level];
    said.textContent = `${size(tier.used, tier.unit)}${tier.total ? ` of ${size(tier.total, tier.unit)}` : ""}${hits === undefined ? "" : `, ${hits} hits`}`;
    const meter = document.createElement("meter");
    meter.max = tier.total || Math.max(1, tier.used);
    meter.value = tier.used;
    meter.high = meter.max * 0.9;
    meter.setAttribute("aria-label", `${tier.name}: ${said.textContent}`);
    row.append(name, meter, said);
    return row;
  }), found);
}

let chosen = null;

export function requests(list, root, all) {
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  list.replaceChildren(...all.map((one) => {
    const item = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.dataset.id = one.id;
    const dot = document.createElement("i");
    dot.className = `dot ${one.outcome === "done" ? "up" : one.outcome === null ? "" : "down"}`;
    const took = one.ended ? `${((one.ended - one.created) * 1000).toFixed(0)} ms` : "running";
    const name = document.createElement("span"), time = document.createElement("span");
    name.textContent = `${one.graph} · ${one.endpoint}`;
    time.textContent = took;
    time.className = "quiet";
    button.append(dot, name, time);
    button.setAttribute("aria-label", `${name.textContent}, ${one.outcome || "running"}, ${took}`);
    button.setAttribute("aria-current", String(one.id === chosen));
    button.addEventListener("click", () => show(root, one.id, list));
    item.append(button);
    return item;
  }));
  if (focused) list.querySelector(`[data-id="${focused}"]`)?.focus();
}

async function show(root, id, list) {
  chosen = id;
  for (const button of list.querySelectorAll("button")) button.setAttribute("aria-current", String(button.dataset.id === id));
  try {
    timeline(root, await get(`/v1/requests/${id}`));
  } catch (error) {
    root.textContent = error.message;
  }
}

export function timeline(root, request) {
  const about = document.createElement("p");
  about.className = "quiet";
  const failures = Object.values(request.failures || {}).join("; ");
  about.textContent = `${request.id} · ${request.outcome || "running"}${failures ? ` · ${failures}` : ""}`;
  const spans = [...(request.timeline || [])].sort((a, b) => a.queued - b.queued).slice(0, 60);
  if (!spans.length) {
    const none = document.createElement("p");
    none.className = "quiet";
    none.textContent = "Its activations were not noted: only a sample of a busy server's requests is.";
    root.replaceChildren(about, none);
    return;
  }
  const zero = Math.min(request.created, ...spans.map((s) => s.queued)), end = Math.max(...spans.map((s) => s.ended));
  const left = 190, width = 900, row = 20, scale = (width - left - 90) / Math.max(end - zero, 1e-6);
  const x = (t) => left + (t - zero) * scale;
  const svg = element("svg", { class: "times", viewBox: `0 0 ${width} ${spans.length * row + 26}`, role: "img",
    "aria-label": `${spans.length} activations within ${((end - zero) * 1000).toFixed(0)} milliseconds` });
  for (let k = 0; k <= 4; k++) {
    const at = zero + ((end - zero) * k) / 4;
    svg.append(element("line", { x1: x(at), x2: x(at), y1: 16, y2: spans.length * row + 20 }),
      element("text", { class: "small", x: x(at), y: 11, "text-anchor": "middle" }, `${((at - zero) * 1000).toFixed(0)} ms`));
  }
  spans.forEach((span, i) => {
    const y = 22 + i * row, name = span.path ? `${span.interface}[${span.path}]` : span.interface;
    svg.append(element("text", { x: 0, y: y + 11 }, name.length > 28 ? `${name.slice(0, 27)}…` : name),
      element("rect", { class: "bar wait", x: x(span.queued), y: y + 3, width: Math.max(0, (span.started - span.queued) * scale), height: 10, rx: 2 }),
      element("rect", { class: "bar", x: x(span.started), y, width: Math.max(2, (span.ended - span.started) * scale), height: 15, rx: 3 },
        element("title", {}, `${name} on ${span.replica}: waited ${((span.started - span.queued) * 1000).toFixed(1)} ms, ran ${((span.ended - span.started) * 1000).toFixed(1)} ms`)),
      element("text", { class: "small", x: Math.min(x(span.ended) + 6, width - 70), y: y + 12 }, span.replica.split("@")[0]));
  });
  root.replaceChildren(about, svg);
}
