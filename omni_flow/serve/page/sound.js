// Sound: plays 16-bit samples as they come, and records the microphone as a WAV file.

export const RATE = 24000;
let context = null;

function audio() {
  context ||= new AudioContext();
  if (context.state === "suspended") context.resume();
  return context;
}

export const toBytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

export function toBase64(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return btoa(text);
}

export class Player {
  constructor() {
    this.parts = [];
    this.at = 0;
    this.sources = [];
  }

  // `bytes`: 16-bit little-endian samples at RATE.
  play(bytes) {
    this.parts.push(bytes);
    const samples = new Int16Array(bytes.buffer, bytes.byteOffset, bytes.length >> 1);
    const floats = Float32Array.from(samples, (s) => s / 32768);
    const out = audio(), buffer = out.createBuffer(1, Math.max(1, floats.length), RATE);
    buffer.copyToChannel(floats, 0);
    const source = out.createBufferSource();
    source.buffer = buffer;
    source.connect(out.destination);
    this.at = Math.max(this.at, out.currentTime + 0.03);
    source.start(this.at);
    this.at += buffer.duration;
    this.sources.push(source);
  }

  stop() {
    for (const source of this.sources) {
      try { source.stop(); } catch { /* it had ended */ }
    }
  }

  get seconds() {
    return this.parts.reduce((sum, part) => sum + part.length, 0) / 2 / RATE;
  }

  // Everything played, to be heard again.
  url() {
    return URL.createObjectURL(new Blob([wavHead(RATE, this.seconds * RATE * 2), ...this.parts], { type: "audio/wav" }));
  }
}

function wavHead(rate, size) {
  const view = new DataView(new ArrayBuffer(44));
  const text = (at, value) => [...value].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF"); view.setUint32(4, size + 36, true); text(8, "WAVEfmt "); view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); view.setUint16(22, 1, true); view.setUint32(24, rate, true); view.setUint32(28, rate * 2, true);
  view.setUint16(32, 2, true); view.setUint16(34, 16, true); text(36, "data"); view.setUint32(40, size, true);
  return view.buffer;
}

export class Recorder {
  async start() {
    this.stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: true } });
    const out = audio();
    await out.audioWorklet.addModule("/page/recorder.js");
    this.source = out.createMediaStreamSource(this.stream);
    this.node = new AudioWorkletNode(out, "recorder");
    this.parts = [];
    this.node.port.onmessage = ({ data }) => this.parts.push(data);
    this.source.connect(this.node);
  }

  // A WAV file of what was heard.
  stop() {
    this.source.disconnect();
    this.stream.getTracks().forEach((track) => track.stop());
    const size = this.parts.reduce((sum, part) => sum + part.length, 0), samples = new Int16Array(size);
    let at = 0;
    for (const part of this.parts) {
      for (const value of part) samples[at++] = Math.max(-1, Math.min(1, value)) * 32767;
    }
    const file = new Uint8Array(44 + size * 2);
    file.set(new Uint8Array(wavHead(audio().sampleRate, size * 2)));
    file.set(new Uint8Array(samples.buffer), 44);
    return { bytes: file, seconds: size / audio().sampleRate };
  }
}
