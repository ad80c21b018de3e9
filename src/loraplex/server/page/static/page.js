// The operator's page: follows the server's stream and shows each picture of it.

import { openAdapter, openLimits } from "./actions.js";
import { bytes, count, el, fill, map, millis, plot, rows, say, span, strip } from "./plots.js";
import { Refused, follow, hasKey, useKey } from "./wire.js";

const TIMELINE_S = 900;
const SECONDS = 120;
const RETRY_MS = 2000;
const $ = (id) => document.getElementById(id);

const REASONS = {
  turn: "its turn", adapter_absent: "adapter on disk", adapter_cold: "adapter in host memory", adapter_loading: "adapter loading",
  max_running: "tenant's limit", places: "a place", pages: "pages", grammar: "a grammar", blocks: "another's blocks",
};
const STATES = { absent: "on disk", host_ready: "in host memory", reserved: "reserved", loading: "loading", validated: "validated", published: "published", active: "active", idle: "idle", retiring: "retiring", unknown: "–" };
const STATE_LOOK = { published: "on", idle: "on", active: "busy", reserved: "moving", loading: "moving", validated: "moving", retiring: "moving" };

let generation = 0;
let sort = { by: "name", down: false };
let past = { seconds: new Map(), incidents: new Map() };
let last = null;

// The stream

function take(data) {
  if (data === "[DONE]") return false;
  const picture = JSON.parse(data);
  if (picture.error) throw new Refused(picture.error.code === "unauthenticated" ? 401 : 403, picture.error);
  show(picture);
  return true;
}

async function run() {
  const mine = ++generation;
  while (mine === generation) {
    try {
      await follow((data) => mine === generation && take(data));
      status("The server ended the stream; trying again", "is-down");
    } catch (error) {
      if (mine !== generation) return;
      if (error.status === 401 || error.status === 403) return askForKey(hasKey() ? error.message : "");
      status(error.status ? error.message : "No answer from the server; trying again", "is-down");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function status(text, look) {
  say($("status-text"), text);
  $("status").className = look;
}

function askForKey(reason) {
  generation++;
  useKey(null);
  [past, last] = [{ seconds: new Map(), incidents: new Map() }, null];
  $("main").hidden = $("sign-out").hidden = true;
  $("dialog").close();
  $("sign-in").hidden = false;
  for (const id of ["viewer", "base"]) say($(id), "");
  say($("sign-in-error"), reason);
  status("A key is needed", "");
  $("key").focus();
}

$("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = $("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(given)) return say($("sign-in-error"), "A key has no spaces and no letters beyond ASCII.");
  useKey(given);
  $("key").value = "";
  $("sign-in").hidden = true;
  status("Connecting", "");
  run();
});
$("sign-out").addEventListener("click", () => location.reload()); // nothing of what was shown stays

// Showing a picture

function show(picture) {
  remember(picture);
  last = picture;
  const { server, viewer } = picture;
  say($("base"), server.base);
  say($("viewer"), viewer.operator ? "operator" : `${viewer.tenant}, ${viewer.role}`);
  const state = server.phase === "draining" ? "Draining" : !server.ready ? "Not ready" : server.answers ? "Live" : "The engine does not answer";
  status(state, state === "Live" ? "is-live" : "is-down");
  $("sign-out").hidden = !hasKey();
  $("limits").hidden = !viewer.operator;
  $("main").hidden = false;
  showPlots(picture);
  showPool(picture);
  showQueue(picture);
  showAdapters();
  showTenants(picture);
  showTimeline(picture);
}

function remember(picture) {
  if (picture.whole) past = { seconds: new Map(), incidents: new Map() };
  for (const second of picture.seconds) past.seconds.set(second.s, { ...past.seconds.get(second.s), ...second });
  for (const s of past.seconds.keys()) if (s < picture.now_s - SECONDS) past.seconds.delete(s);
  const here = past.seconds.get(picture.now_s - 1) ?? { s: picture.now_s - 1 };
  past.seconds.set(here.s, { running: picture.requests.running ?? 0, waiting: picture.requests.waiting ?? 0, ...here });
  for (const incident of picture.incidents) past.incidents.set(incident.id, { ...incident, at_ms: picture.at_ms - incident.age_s * 1000 });
  for (const [id, incident] of past.incidents) if (picture.at_ms - incident.at_ms > TIMELINE_S * 1000) past.incidents.delete(id);
}

/** A figure of each of the last two minutes' seconds. The newest ones may still come in and are left out. */
function history(picture, name, absent) {
  const end = picture.now_s - 1;
  return Array.from({ length: SECONDS }, (_, i) => past.seconds.get(end - SECONDS + i)?.[name] ?? absent);
}

/** The mean of the last seconds that have a value. */
function recent(values, seconds) {
  const seen = values.slice(-seconds).filter((v) => v != null);
  return seen.length ? seen.reduce((a, b) => a + b, 0) / seen.length : null;
}

function showPlots(picture) {
  const area = $("plots");
  const tokens = history(picture, "tokens", 0);
  plot(area, "Output tokens", count(Math.round(recent(tokens, 3))), "per second", [tokens], count);
  const [first, slow] = [history(picture, "first_ms", null), history(picture, "first_p95_ms", null)];
  plot(area, "Time to first token", millis(recent(first, 5)), `median, ${millis(recent(slow, 5))} p95`, [first, slow], millis);
  if (picture.viewer.operator) {
    const steps = history(picture, "step_ms", null);
    plot(area, "Step", millis(recent(steps, 5)), "on the device", [steps], millis);
  } else {
    const ended = history(picture, "ended", 0);
    plot(area, "Requests ended", count(Math.round(recent(ended, 5))), "per second", [ended], count);
  }
  const { running = 0, waiting = 0 } = picture.requests;
  plot(area, "Requests", count(running), `running, ${count(waiting)} waiting`, [history(picture, "running", null), history(picture, "waiting", null)], count);
}

const KINDS = [["kv", "KV of requests"], ["prefix", "cached prefixes"], ["reserved", "reserved"], ["free", "free"]];

function showPool({ pool, host, viewer }) {
  const owned = pool.owners.reduce((sum, owner) => sum + owner.pages, 0);
  const others = Math.max(0, pool.adapter - owned);
  const parts = pool.owners.map((owner, index) => ({ kind: "adapter", odd: index % 2 === 1, ...owner }));
  if (others) parts.push({ kind: "adapter", odd: parts.length % 2 === 1, name: parts.length ? "other adapters" : "adapters", pages: others });
  for (const [kind, name] of KINDS) parts.push({ kind, name, pages: pool[kind] });
  const per = map($("pool-map"), parts, pool.total);
  say($("pool-note"), pool.total ? `${count(pool.total)} pages of ${bytes(pool.page_bytes)}; a square is ${per <= 1 ? "one" : `some ${count(Math.round(per))}`}` : "no figures yet");
  const legend = [["adapter", "adapters"], ...KINDS];
  fill($("pool-legend"), legend, ([kind]) => kind, ([kind, name]) => el("li", {}, el("span", { class: `swatch of-${kind}` }), `${name} `, el("b")),
    (item, [kind]) => say(item.querySelector("b"), count(pool[kind])));
  rows($("pool-rows"), parts.filter((part) => part.pages), (part) => `${part.kind} ${part.name}`, [
    { text: (part) => part.name, kind: "name" },
    { text: (part) => (part.kind === "adapter" ? `adapter${part.state ? `, ${STATES[part.state] ?? part.state}` : ""}` : part.kind) },
    { text: (part) => count(part.pages), kind: "n" },
    { text: (part) => bytes(part.pages * pool.page_bytes), kind: "n" },
  ], "No pages.");
  const tiers = [{ name: "Device pool", used: (pool.total - pool.free) * pool.page_bytes, limit: pool.total * pool.page_bytes }];
  if (host) tiers.push({ name: "Host images", used: host.used_bytes, limit: host.limit_bytes });
  fill($("tiers"), tiers.flatMap((tier) => ["dt", "bar", "size"].map((part) => ({ ...tier, part }))), (tier) => tier.name + tier.part,
    ({ name, part }) => (part === "dt" ? el("dt", {}, name) : el("dd", {}, part === "bar" ? el("span", { class: "track" }, el("i")) : "")),
    (node, tier) => {
      if (tier.part === "bar") node.querySelector("i").style.width = `${Math.min(100, (100 * tier.used) / (tier.limit || 1))}%`;
      if (tier.part === "size") say(node, `${bytes(tier.used)} of ${bytes(tier.limit)}`);
    });
}

function showQueue({ queue, requests }) {
  const waiting = requests.waiting ?? 0;
  say($("queue-note"), waiting ? `${count(waiting)} waiting, ${count(requests.running ?? 0)} running` : `nobody waits, ${count(requests.running ?? 0)} running`);
  const reasons = Object.entries(queue.reasons).sort((a, b) => b[1] - a[1]);
  fill($("queue-reasons"), reasons, ([reason]) => reason, ([reason]) => el("li", {}, el("span", {}, REASONS[reason] ?? reason), el("span", { class: "track" }, el("i")), el("b")),
    (item, [, n]) => {
      item.querySelector("i").style.width = `${(100 * n) / (waiting || 1)}%`;
      say(item.querySelector("b"), count(n));
    });
  rows($("queue-rows"), queue.oldest, (request) => request.id, [
    { text: (request) => REASONS[request.reason] ?? request.reason },
    { text: (request) => request.adapter ?? "base", kind: "name" },
    { text: (request) => request.tenant, kind: "name" },
    { text: (request) => count(request.prompt_tokens), kind: "n" },
    { text: (request) => span(request.age_s), kind: "n" },
  ], "No request waits.");
}

const COLUMNS = [
  { by: "name", head: "Name", kind: "name", node: nameCell },
  { by: "revision", head: "Rev", kind: "n", text: (row) => row.revision ?? "–" },
  { by: "state", head: "State", node: stateCell },
  { by: "leases", head: "Leases", kind: "n", text: (row) => count(row.leases) },
  { by: "hit", head: "Hit rate", title: "Requests that found it on the device", kind: "n", text: (row) => (row.hits + row.misses ? `${Math.round(100 * hit(row))} % of ${count(row.hits + row.misses)}` : "–"), operator: true },
  { by: "device_bytes", head: "Device", kind: "n", text: (row) => (row.device_bytes ? bytes(row.device_bytes) : "–") },
  { by: "host_bytes", head: "Host", kind: "n narrow-off", text: (row) => (row.host_bytes ? bytes(row.host_bytes) : "–") },
  { by: "method", head: "Method", kind: "narrow-off", text: (row) => row.method ?? "–" },
  { by: "digest", head: "Digest", kind: "narrow-off", text: (row) => row.digest.slice(0, 10) },
];

function hit(row) {
  return row.hits + row.misses ? row.hits / (row.hits + row.misses) : -1;
}

function nameCell(cell, row) {
  if (!cell.firstChild) cell.append(el("button", { class: "link", type: "button", onclick: () => open(cell.dataset.name) }), el("span", { class: "tag" }, "pinned"));
  cell.dataset.name = row.name;
  cell.title = row.name;
  say(cell.firstChild, row.name);
  cell.lastChild.hidden = !row.pinned;
  cell.firstChild.disabled = row.revision === null;
}

function stateCell(cell, row) {
  if (!cell.firstChild) cell.append(el("span"));
  cell.firstChild.className = `state ${STATE_LOOK[row.state] ?? ""}`;
  say(cell.firstChild, STATES[row.state] ?? row.state);
}

function open(name) {
  openAdapter(name, last.viewer, last.adapters.rows.find((row) => row.name === name)?.own);
}

function showAdapters() {
  const { adapters, viewer } = last;
  const columns = COLUMNS.filter((column) => viewer.operator || !column.operator);
  fill($("adapter-heads"), columns, (column) => column.by,
    (column) => el("th", { scope: "col", class: column.kind ?? "" }, el("button", { type: "button", title: column.title, onclick: () => sortBy(column.by) }, column.head)),
    (head, column) => (column.by === sort.by ? head.setAttribute("aria-sort", sort.down ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
  const wanted = $("find-name").value.trim().toLowerCase();
  const value = (row) => (sort.by === "hit" ? hit(row) : row[sort.by] ?? "");
  const shown = adapters.rows.filter((row) => row.name.toLowerCase().includes(wanted)).sort((a, b) => {
    const [x, y] = sort.down ? [value(b), value(a)] : [value(a), value(b)];
    return (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y))) || a.name.localeCompare(b.name);
  });
  rows($("adapter-rows"), shown, (row) => row.digest, columns, wanted ? "No adapter of the table has this in its name; Open looks among all." : "No adapters.");
  const states = Object.entries(adapters.states ?? {}).sort((a, b) => b[1] - a[1]).map(([state, n]) => `${count(n)} ${STATES[state] ?? state}`);
  const all = adapters.rows.length < adapters.total ? `${count(adapters.rows.length)} of ${count(adapters.total)}: on the device first, then the last used` : count(adapters.total);
  say($("adapters-note"), [all, ...states].join(" · "));
}

function sortBy(column) {
  sort = { by: column, down: sort.by === column ? !sort.down : column !== "name" && column !== "state" };
  showAdapters();
}

$("find-name").addEventListener("input", () => last && showAdapters());
$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = $("find-name").value.trim();
  if (name) open(name);
});
$("limits").addEventListener("click", () => openLimits());

function showTenants({ tenants }) {
  rows($("tenant-rows"), tenants, (row) => row.tenant, [
    { text: (row) => row.tenant, kind: "name" },
    ...["running", "waiting", "ended", "failed", "computed_tokens", "cached_tokens", "output_tokens", "weight", "service"].map((name) => (
      { text: (row) => (row[name] == null ? "–" : count(Math.round(row[name] * 100) / 100)), kind: "n" })),
  ], "No tenant has asked for anything yet.");
}

function showTimeline(picture) {
  const incidents = [...past.incidents.values()].map((incident) => ({ ...incident, id: `i${incident.id}`, age_s: (picture.at_ms - incident.at_ms) / 1000 }));
  const swaps = picture.publications.map((one) => ({
    id: `p${one.name}@${one.revision}`, age_s: one.age_s, level: one.revision > 1 ? "swap" : "info", adapter: one.name, count: 1,
    tenant: null, text: one.revision > 1 ? `was swapped: revision ${one.revision} answers now` : "was published",
  }));
  const items = [...incidents, ...swaps].sort((a, b) => a.age_s - b.age_s);
  strip($("timeline-strip"), items, TIMELINE_S);
  const list = $("timeline-rows");
  if (!items.length) return list.replaceChildren(el("li", {}, el("span", { class: "note" }, "–"), el("span", { class: "note" }, "Nothing was swapped, evicted or refused.")));
  fill(list, items, (item) => item.id, () => el("li", {}, el("time"), el("span", { class: "what" })), (node, item) => {
    node.className = `level-${item.level}`;
    say(node.firstChild, item.age_s < 5 ? "now" : `${span(item.age_s)}`);
    const tenant = picture.viewer.operator && item.tenant ? ` (${item.tenant})` : "";
    const text = `${item.adapter ? " " : ""}${item.text}${tenant}${item.count > 1 ? ` (${count(item.count)} times)` : ""}`;
    if (node.lastChild.textContent !== (item.adapter ?? "") + text) node.lastChild.replaceChildren(...(item.adapter ? [el("b", {}, item.adapter)] : []), text);
  });
}

run();
