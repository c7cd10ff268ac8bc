// The playground: a conversation with text, pictures and sound, both ways.

import { call, events, get } from "./api.js";
import { Player, Recorder, toBase64, toBytes } from "./sound.js";

const $ = (id) => document.getElementById(id);
const history = [];
let models = [], picture = null, sound = null, recorder = null, controller = null;

export async function fillModels() {
  const found = await get("/v1/models");
  models = found.data.flatMap((model) => model.serves
    .filter((kind) => ["ChatCompletions", "Images", "Speech"].includes(kind))
    .map((kind) => ({ id: model.id, kind, graph: model.graph })));
  const select = $("model"), before = select.value;
  select.replaceChildren(...models.map((model, i) => {
    const words = { ChatCompletions: "chat", Images: "pictures", Speech: "speech" };
    return new Option(`${model.id} · ${words[model.kind]}`, String(i));
  }));
  if (before && before < models.length) select.value = before;
  $("send").disabled = !models.length;
  if (!models.length) $("message").placeholder = "No graph here states an endpoint of the OpenAI API: see /v1/graphs";
}

function bubble(kind, text = "") {
  const made = document.createElement("div");
  made.className = `bubble ${kind}`;
  const said = document.createElement("span");
  said.textContent = text;
  made.append(said);
  $("log").append(made);
  $("log").scrollTop = $("log").scrollHeight;
  return { made, said };
}

function image(parent, url, text) {
  const shown = Object.assign(new Image(), { src: url, alt: text });
  parent.append(shown);
  shown.addEventListener("load", () => { $("log").scrollTop = $("log").scrollHeight; });
  return shown;
}

function listen(parent, url) {
  const player = document.createElement("audio");
  player.controls = true;
  player.src = url;
  player.setAttribute("aria-label", "Sound");
  parent.append(player);
}

function chips() {
  const made = [];
  const chip = (text, url, drop) => {
    const one = document.createElement("span");
    one.className = "chip";
    if (url) one.append(Object.assign(new Image(), { src: url, alt: "" }));
    const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
    remove.setAttribute("aria-label", `Remove ${text}`);
    remove.addEventListener("click", () => { drop(); chips(); });
    one.append(text, remove);
    made.push(one);
  };
  if (picture) chip("picture", picture, () => { picture = null; $("picture").value = ""; });
  if (sound) chip(`sound, ${sound.seconds.toFixed(1)} s`, null, () => { sound = null; });
  $("attached").replaceChildren(...made);
}

function takePicture(file) {
  if (!file || !file.type.startsWith("image/")) return;
  const reader = new FileReader();
  reader.onload = () => { picture = reader.result; chips(); };
  reader.readAsDataURL(file);
}

async function record() {
  const button = $("record");
  try {
    if (recorder) {
      sound = recorder.stop();
      recorder = null;
      chips();
    } else {
      const next = new Recorder();
      await next.start();
      recorder = next;
    }
  } catch (error) {
    bubble("error", `The microphone can't be used: ${error.message}`);
  }
  button.setAttribute("aria-pressed", String(recorder !== null));
  button.textContent = recorder ? "Stop recording" : "Microphone";
}

function content(text) {
  const parts = [];
  if (text) parts.push({ type: "text", text });
  if (picture) parts.push({ type: "image_url", image_url: { url: picture } });
  if (sound) parts.push({ type: "input_audio", input_audio: { data: toBase64(sound.bytes), format: "wav" } });
  return parts.length === 1 && text ? text : parts;
}

async function send() {
  const text = $("message").value.trim(), model = models[Number($("model").value)];
  if (!model || controller || (!text && !picture && !sound)) return;
  if (recorder) await record();
  const mine = bubble("mine", text);
  if (picture) image(mine.made, picture, "Your picture");
  if (sound) listen(mine.made, URL.createObjectURL(new Blob([sound.bytes], { type: "audio/wav" })));
  const asked = content(text);
  $("message").value = "";
  picture = sound = null;
  $("picture").value = "";
  chips();
  controller = new AbortController();
  $("stop").hidden = false;
  $("send").disabled = true;
  const answer = bubble(""), started = performance.now();
  answer.said.textContent = "…";
  try {
    const first = await { ChatCompletions: chat, Images: draw, Speech: speak }[model.kind](model.id, asked, text, answer, started);
    const about = document.createElement("span");
    about.className = "about";
    about.textContent = `first after ${first.toFixed(0)} ms, whole after ${(performance.now() - started).toFixed(0)} ms`;
    answer.made.append(about);
  } catch (error) {
    if (error.name === "AbortError") answer.said.textContent += " (stopped)";
    else {
      answer.made.classList.add("error");
      answer.said.textContent = error.message;
    }
  } finally {
    controller = null;
    $("stop").hidden = true;
    $("send").disabled = false;
    $("log").scrollTop = $("log").scrollHeight;
  }
}

async function chat(model, asked, text, answer, started) {
  const speaks = $("speak").checked, player = new Player();
  history.push({ role: "user", content: asked });
  const body = { model, messages: history, stream: true };
  if (speaks) Object.assign(body, { modalities: ["text", "audio"], audio: { voice: "default", format: "pcm16" } });
  let first = 0, said = "";
  const stream = async () => {
    for await (const { event, data } of events("POST", "/v1/chat/completions", body, controller.signal)) {
      if (event === "error") throw new Error(data.error.message);
      const delta = data.choices?.[0]?.delta || {};
      const piece = delta.content || delta.audio?.transcript;
      if (piece) {
        said += piece;
        answer.said.textContent = said;
      }
      if (delta.audio?.data) player.play(toBytes(delta.audio.data));
      for (const part of delta.images || []) image(answer.made, part.image_url.url, "Picture of the answer");
      if (!first && (piece || delta.audio?.data || delta.images)) first = performance.now() - started;
      $("log").scrollTop = $("log").scrollHeight;
    }
  };
  try {
    await stream();
  } catch (error) {
    if (error.status !== 400 || error.error?.param !== "modalities") {
      player.stop();
      history.pop();
      throw error;
    }
    $("speak").checked = false; // this model is silent
    delete body.modalities;
    delete body.audio;
    await stream();
  }
  if (!said) answer.said.textContent = player.parts.length ? "" : "(no text)";
  history.push({ role: "assistant", content: said });
  if (player.parts.length) listen(answer.made, player.url());
  return first;
}

async function draw(model, asked, text, answer, started) {
  const body = { model, prompt: text, size: "512x512", stream: true, partial_images: 2 };
  let first = 0, shown = null;
  answer.said.textContent = "";
  for await (const { event, data } of events("POST", "/v1/images/generations", body, controller.signal)) {
    if (event === "error") throw new Error(data.error.message);
    first ||= performance.now() - started;
    shown ||= image(answer.made, "", `Picture: ${text}`);
    shown.src = `data:image/${data.output_format};base64,${data.b64_json}`;
  }
  return first;
}

async function speak(model, asked, text, answer, started) {
  const body = { model, input: text, response_format: "pcm" }, player = new Player();
  const reader = (await call("POST", "/v1/audio/speech", body, controller.signal)).body.getReader();
  let first = 0, rest = new Uint8Array(0);
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    first ||= performance.now() - started;
    const data = new Uint8Array(rest.length + value.length);
    data.set(rest);
    data.set(value, rest.length);
    const whole = data.length & ~1;
    if (whole) player.play(data.slice(0, whole));
    rest = data.slice(whole);
  }
  answer.said.textContent = "";
  listen(answer.made, player.url());
  return first;
}

export function start() {
  $("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  $("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  $("message").addEventListener("paste", (event) => takePicture([...event.clipboardData.files][0]));
  $("picture").addEventListener("change", (event) => takePicture(event.target.files[0]));
  $("record").addEventListener("click", record);
  $("stop").addEventListener("click", () => controller?.abort());
  $("form").addEventListener("dragover", (event) => event.preventDefault());
  $("form").addEventListener("drop", (event) => { event.preventDefault(); takePicture(event.dataTransfer.files[0]); });
}
