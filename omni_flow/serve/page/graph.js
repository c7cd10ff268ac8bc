// The live graph: interfaces from left to right, edges with rates and latencies, colour for trouble.

const NS = "http://www.w3.org/2000/svg";
const W = 166, H = 70, GAP_X = 142, GAP_Y = 34, PAD = 14, LANE = 24;
const TROUBLE_MS = 15000;

const deaths = new Map(); // place → {restarts, at}

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A replica that died just now is in trouble although its successor may be up already.
export function replicaState(graph, replica, now = Date.now()) {
  const place = `${graph}/${replica.place}`;
  const known = deaths.get(place);
  if (known === undefined) deaths.set(place, { restarts: replica.restarts, at: 0 });
  else if (replica.restarts > known.restarts) deaths.set(place, { restarts: replica.restarts, at: now });
  const died = now - (deaths.get(place).at || -Infinity) < TROUBLE_MS;
  if (replica.state === "down" || died || (replica.state === "starting" && replica.cause)) return "down";
  return replica.state;
}

export function roleState(graph, role) {
  const states = role.replicas.map((replica) => replicaState(graph, replica));
  if (states.includes("down") || role.state === "down") return "down";
  return role.state === "up" ? "up" : role.state;
}

function depths(graph) {
  const depth = new Map(graph.interfaces.map((i) => [i.name, 0]));
  for (let round = 0; round < graph.interfaces.length; round++) {
    let changed = false;
    for (const edge of graph.edges) {
      if (!depth.has(edge.source) || !depth.has(edge.reader) || edge.source === edge.reader) continue;
      const next = depth.get(edge.source) + 1;
      if (next > depth.get(edge.reader) && next < graph.interfaces.length) {
        depth.set(edge.reader, next);
        changed = true;
      }
    }
    if (!changed) break;
  }
  return depth;
}

// Places of all nodes; edges that pass over a column get a lane above everything.
function layout(graph) {
  const depth = depths(graph), columns = [];
  for (const { name } of graph.interfaces) (columns[depth.get(name)] ||= []).push(name);
  const filled = columns.filter((column) => column?.length);
  const column = new Map(filled.flatMap((names, x) => names.map((name) => [name, x])));
  const ends = (edge) => [edge.source === "client" ? -1 : column.get(edge.source), edge.reader === "client" ? filled.length : column.get(edge.reader)];
  const edges = graph.edges.map((edge) => ({ ...edge, from: edge.source === "client" ? "in" : edge.source, to: edge.reader === "client" ? "out" : edge.reader, ends: ends(edge) }))
    .filter((edge) => edge.ends.every((x) => x !== undefined));
  let lanes = 0;
  for (const edge of edges) if (edge.ends[1] - edge.ends[0] > 1 && filled.length) edge.lane = lanes++;
  const top = PAD + lanes * LANE, rows = Math.max(2, ...filled.map((names) => names.length));
  const height = top + rows * (H + GAP_Y) - GAP_Y + PAD + 24;
  const middle = (top + height - 24) / 2, places = new Map();
  filled.forEach((names, x) => names.forEach((name, y) => {
    const first = middle - (names.length * (H + GAP_Y) - GAP_Y) / 2;
    places.set(name, { x: PAD + 84 + GAP_X + x * (W + GAP_X), y: first + y * (H + GAP_Y), w: W, h: H });
  }));
  const width = PAD * 2 + 84 * 2 + GAP_X + filled.length * (W + GAP_X);
  places.set("in", { x: PAD, y: middle - 45, w: 84, h: 90 });
  places.set("out", { x: width - PAD - 84, y: middle - 45, w: 84, h: 90 });
  for (const side of ["from", "to"]) {
    const other = side === "from" ? "to" : "from";
    for (const [name, at] of places) {
      const own = edges.filter((edge) => edge[side] === name)
        .sort((a, b) => (a.lane ?? 1e3) - (b.lane ?? 1e3) || places.get(a[other]).y - places.get(b[other]).y);
      own.forEach((edge, k) => { edge[`${side}Y`] = at.y + (at.h * (k + 1)) / (own.length + 1); });
    }
  }
  return { places, edges, width, height };
}

function route(edge, places, height) {
  const from = places.get(edge.from), to = places.get(edge.to);
  const x1 = from.x + from.w, y1 = edge.fromY, x2 = to.x, y2 = edge.toY;
  if (edge.lane !== undefined) {
    const y = PAD + edge.lane * LANE + 4, bend = GAP_X / 2;
    return { d: `M${x1} ${y1} C${x1 + bend} ${y1} ${x1 + bend / 2} ${y} ${x1 + GAP_X} ${y} L${x2 - GAP_X} ${y} C${x2 - bend / 2} ${y} ${x2 - bend} ${y2} ${x2} ${y2}`, x: (x1 + x2) / 2, y: y + 4 };
  }
  if (x2 <= x1) {
    const y = height - 10;
    return { d: `M${x1} ${y1} C${x1 + 80} ${y} ${x2 - 80} ${y} ${x2} ${y2}`, x: (x1 + x2) / 2, y: height - 18 };
  }
  const bend = (x2 - x1) / 2;
  return { d: `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`, x: (x1 + x2) / 2, y: (y1 + y2) / 2 + 4 };
}

const ms = (value) => (value >= 1000 ? `${(value / 1000).toFixed(1)} s` : value >= 10 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`);

export function draw(root, graph) {
  const { places, edges, width, height } = layout(graph);
  const svg = element("svg", { class: "flow", viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const labels = element("g"), taken = [];
  for (const edge of edges) {
    const { d, x, y } = route(edge, places, height);
    const kind = ["edge", edge.per_s > 0 ? "busy" : "", edge.stream ? "stream" : ""].join(" ");
    svg.append(element("path", { class: kind, d }));
    const label = { x, y };
    while (taken.some((t) => Math.abs(t.x - label.x) < 90 && Math.abs(t.y - label.y) < 13)) label.y += 13;
    taken.push(label);
    const name = edge.field.split(".").pop();
    const text = edge.per_s > 0 ? `${name} ${edge.per_s.toFixed(1)}/s · ${ms(edge.wait_p50_ms)}` : name;
    labels.append(element("text", { class: "label", x: label.x, y: label.y, "text-anchor": "middle" }, text));
  }
  for (const [name, at] of [["client", places.get("in")], ["client", places.get("out")]]) {
    svg.append(element("g", { class: "node client" }, element("rect", { x: at.x, y: at.y, width: at.w, height: at.h, rx: 12 }),
      element("text", { class: "name", x: at.x + at.w / 2, y: at.y + at.h / 2 + 5, "text-anchor": "middle" }, name)));
  }
  const roles = new Map(graph.roles.map((role) => [role.role, role]));
  for (const one of graph.interfaces) {
    const at = places.get(one.name), role = roles.get(one.role);
    const state = role ? roleState(graph.name, role) : "up";
    const waiting = role ? role.replicas.reduce((sum, r) => sum + (r.held?.nodes || 0), 0) : 0;
    const group = element("g", { class: `node ${state}`, "data-role": one.role },
      element("title", {}, `${one.name}: ${state}`),
      element("rect", { x: at.x, y: at.y, width: at.w, height: at.h, rx: 12 }),
      element("text", { class: "name", x: at.x + 12, y: at.y + 22 }, one.name.length > 20 ? `${one.name.slice(0, 19)}…` : one.name),
      element("text", { class: "small", x: at.x + 12, y: at.y + 39 }, `${one.per_s.toFixed(1)}/s · run ${ms(one.run_p50_ms)}`),
      element("text", { class: "small", x: at.x + 12, y: at.y + 55 }, `${waiting} open`));
    (role?.replicas || []).slice(0, 12).forEach((replica, i) => {
      group.append(element("circle", { class: `replica ${replicaState(graph.name, replica)}`, cx: at.x + at.w - 14 - i * 13, cy: at.y + 51, r: 4.5 }));
    });
    svg.append(group);
  }
  svg.append(labels);
  root.replaceChildren(svg);
}
