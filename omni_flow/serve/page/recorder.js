// Runs on the audio thread: hands samples of the microphone to the page.

registerProcessor("recorder", class extends AudioWorkletProcessor {
  process([input]) {
    if (input[0]) this.port.postMessage(input[0].slice());
    return true;
  }
});
