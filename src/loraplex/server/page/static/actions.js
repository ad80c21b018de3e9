// Changes adapters and limits through the server's own endpoints, each after a dialog that says what will happen.

import { bytes, count, el, say } from "./plots.js";
import { call } from "./wire.js";

const $ = (id) => document.getElementById(id);
const GIB = 2 ** 30;

const path = (name) => `v1/adapters/${encodeURIComponent(name)}`;

/** Show a dialog. buttons: {text, look, act}; act may throw, and then its sentence is shown and the dialog stays. */
function dialog(title, body, buttons) {
  say($("dialog-head"), title);
  say($("dialog-error"), "");
  $("dialog-body").replaceChildren(...body);
  const made = buttons.map(({ text, look, act }) =>
    el("button", { type: "button", class: look ?? "", onclick: () => attempt(act) }, text));
  $("dialog-buttons").replaceChildren(...made, el("button", { type: "button", onclick: () => $("dialog").close() }, buttons.length ? "Cancel" : "Close"));
  if (!$("dialog").open) $("dialog").showModal();
  ($("dialog-body").querySelector("input") ?? $("dialog-buttons").lastChild).focus();
}

async function attempt(act) {
  const buttons = [...$("dialog-buttons").children];
  for (const button of buttons) button.disabled = true;
  say($("dialog-error"), "");
  try {
    await act();
  } catch (error) {
    say($("dialog-error"), error.message);
  } finally {
    for (const button of buttons) button.disabled = false;
  }
}

$("dialog").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault(); // Enter in a field presses the first button, as the eye expects
  $("dialog-buttons").firstChild.click();
});

const lines = (pairs) => el("dl", {}, ...pairs.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
const text = (words) => el("p", {}, words);

/** Everything that is known of an adapter, and what this viewer may do with it. */
export async function openAdapter(name, viewer, own) {
  let item;
  try {
    item = await call("GET", path(name));
  } catch (error) {
    return dialog(name, [text(error.message)], []);
  }
  const facts = lines([
    ["Revision", item.revision], ["State", item.pinned ? `${item.state}, pinned` : item.state], ["Leases", count(item.leases)],
    ["Method", `${item.method}, rank ${item.ranks.join("/")}`], ["Targets", item.targets.join(", ")],
    ["Tensors", `${count(item.tensors_applied)} of ${count(item.tensors_total)} applied`],
    ["Device", bytes(item.tier_bytes.device)], ["Host", bytes(item.tier_bytes.host)], ["Source", item.source],
    ["Semantic digest", item.semantic_digest], ...(item.notes?.length ? [["Notes", [item.notes].flat().join("; ")]] : []),
  ]);
  const may = viewer.role === "admin" && (own ?? !name.includes("/"));
  const actions = may ? [
    { text: "Swap…", act: () => confirmSwap(item) },
    item.pinned ? { text: "Unpin…", act: () => confirmUnpin(item) } : { text: "Pin…", act: () => confirmPin(item) },
    { text: "Revoke…", act: () => confirmRevoke(item) },
    { text: "Remove…", act: () => confirmRemove(item) },
  ] : [];
  dialog(item.alias, [facts], actions);
}

/** Do a change, then show what the adapter is now. */
function then(item, change) {
  return async () => {
    await change();
    $("dialog").close();
  };
}

function confirmSwap(item) {
  const source = el("input", { type: "text", required: true, autocomplete: "off", spellcheck: "false", value: item.source });
  const drain = el("input", { type: "checkbox" });
  dialog(`Swap ${item.alias}`, [
    text(`Revision ${item.revision} answers until the new one is read, verified and on the device. Requests under way finish on revision ${item.revision}; later ones get revision ${item.revision + 1}. If anything fails before, nothing changes.`),
    el("label", {}, "Source: a folder that the server may read, or a remote source", source),
    el("label", { class: "check" }, drain, "Without room for both: move the name first, then load into what the old one leaves. New requests wait meanwhile."),
  ], [{
    text: `Swap to revision ${item.revision + 1}`, look: "primary",
    act: then(item, () => call("PUT", path(item.alias), { source: source.value.trim(), expected_revision: item.revision, drain: drain.checked })),
  }]);
}

function confirmPin(item) {
  dialog(`Pin ${item.alias}`, [
    text("It is loaded now if it is not on the device, and stays there, whatever revision the name stands for. Its pages are not available to requests or to other adapters until it is unpinned."),
  ], [{ text: "Pin", look: "primary", act: then(item, () => call("POST", `${path(item.alias)}/pin`)) }]);
}

function confirmUnpin(item) {
  dialog(`Unpin ${item.alias}`, [text("It may be evicted when its pages are needed. It is loaded again when a request asks for it.")],
    [{ text: "Unpin", look: "primary", act: then(item, () => call("POST", `${path(item.alias)}/unpin`)) }]);
}

function confirmRevoke(item) {
  dialog(`Revoke ${item.alias}@${item.revision}`, [
    text(`Its bytes are taken away under every name that you may change them under, for good. ${item.leases ? `${count(item.leases)} requests hold it now and end` : "Requests that hold it end"} with the error adapter_revoked. This cannot be undone: the same bytes are refused afterwards.`),
  ], [{ text: "Revoke for good", look: "danger", act: then(item, () => call("POST", `${path(item.alias)}/revoke`)) }]);
}

function confirmRemove(item) {
  dialog(`Remove ${item.alias}`, [
    text(`The name is unknown at once. ${item.leases ? `The ${count(item.leases)} requests that hold it` : "Requests that hold it"} finish; new ones are refused with model_not_found. The files stay where they are, and the name can be registered again.`),
  ], [{ text: "Remove the name", look: "danger", act: then(item, () => call("DELETE", path(item.alias))) }]);
}

/** What adapters may take, and to change it. */
export async function openLimits() {
  let now;
  try {
    now = await call("GET", "v1/limits");
  } catch (error) {
    return dialog("Limits", [text(error.message)], []);
  }
  const field = (label, value, step) => {
    const input = el("input", { type: "number", min: 0, step, value, "data-was": value });
    return [input, el("label", {}, label, input)];
  };
  const [share, shareLabel] = field("Part of the pool, 0 to 1", Number(now.pool_share.toFixed(4)), "any");
  const [resident, residentLabel] = field("Adapters on the device", now.resident_adapters, 1);
  const [host, hostLabel] = field("Adapter images in host memory, GiB", Number((now.host_bytes / GIB).toFixed(3)), "any");
  dialog("What adapters may take", [
    text("Below what is in use now, adapters that are idle are evicted until the limit holds. Requests that run go on."), shareLabel, residentLabel, hostLabel,
  ], [{
    text: "Set these limits", look: "primary",
    act: async () => {
      const changes = {};
      for (const [name, input] of [["pool_share", share], ["resident_adapters", resident], ["host_gb", host]]) {
        if (input.value !== input.dataset.was) changes[name] = Number(input.value);
      }
      if (Object.keys(changes).length) await call("PUT", "v1/limits", changes);
      $("dialog").close();
    },
  }]);
}
