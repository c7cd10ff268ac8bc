// Puts the page together: the live feed, the theme, the key, the playground.

import { events, key, Refused } from "./api.js";
import * as chat from "./chat.js";
import { draw, roleState } from "./graph.js";
import { interfaces, memory, replicas, requests } from "./tables.js";

const $ = (id) => document.getElementById(id);
let shown = "";

function show(snapshot) {
  const select = $("graph-select"), names = snapshot.graphs.map((graph) => graph.name);
  if (select.options.length !== names.length) {
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(shown)) select.value = shown;
    select.closest("label").hidden = names.length < 2;
  }
  shown = select.value || names[0];
  const graph = snapshot.graphs.find((one) => one.name === shown);
  const trouble = snapshot.graphs.some((one) => one.roles.some((role) => roleState(one.name, role) === "down"));
  const status = trouble ? "trouble" : snapshot.status;
  if ($("status").textContent !== status) $("status").textContent = status;
  $("status").className = `pill ${trouble ? "down" : snapshot.status === "up" ? "up" : snapshot.status}`;
  $("numbers").textContent = `${snapshot.live} live · ${graph.requests_per_s.toFixed(1)} requests/s · ${snapshot.sessions} sessions · v${snapshot.version}`;
  draw($("graph"), graph);
  replicas($("replicas"), graph);
  interfaces($("interfaces"), graph);
  memory($("memory"), graph);
  requests($("requests"), $("timeline"), snapshot.requests);
}

async function feed() {
  for (;;) {
    try {
      for await (const { data } of events("GET", "/v1/live")) show(data);
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        askKey();
        await new Promise((resolve) => $("key-dialog").addEventListener("close", resolve, { once: true }));
        continue;
      }
    }
    $("status").textContent = "no connection";
    $("status").className = "pill down";
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function askKey() {
  if (!$("key-dialog").open) $("key-dialog").showModal();
  $("key").focus();
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme || (dark ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("omni-flow-theme", document.documentElement.dataset.theme);
}

const stored = localStorage.getItem("omni-flow-theme");
if (stored) document.documentElement.dataset.theme = stored;
$("theme").addEventListener("click", theme);
$("key-open").addEventListener("click", askKey);
$("key-dialog").addEventListener("close", () => {
  key.set($("key").value);
  $("key").value = "";
  chat.fillModels().catch(() => {});
});
chat.start();
chat.fillModels().catch(() => {});
feed();
