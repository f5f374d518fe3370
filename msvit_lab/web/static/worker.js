// The models, off the page's thread.
//
// In, each with a number:
//      {kind: "start", about}                     Out: {kind: "progress", loaded, total}, {kind: "ready", threads}
//      {kind: "image", id, pixels, width, height}      {kind: "scores", id, scores}
//      {kind: "mask", id, mask}                        {kind: "mixed", id, tokens, probabilities}
//                                                      {kind: "dense", id, probabilities}
//                                                      {kind: "times", tokens, mixed, dense}: medians in ms
//                                                      {kind: "idle", number}: everything up to this message is done
//      any                                             {kind: "error", message}
//
// What is asked last is done first: a newer image or mask takes the place of one that waits. When nothing waits, both
// models run in turn a few times, so that their times are of the same moment.

import { normalise, resize, shownBox } from "./resize.js";

const ROUNDS = 5; // runs of each model behind a median
const KEPT = 9; // last times of each

let about, ort, sessions;
let input = null; // of the last image
let imageId = null;
let asked = { image: null, mask: null };
let current = null; // the mask that was run last
let denseDone = true;
let working = false;
let number = 0; // of the last message
const times = { gate: [], dense: [], trunk: new Map() };

self.onmessage = ({ data }) => {
  number = data.number;
  if (data.kind === "start") start(data.about).catch(fail);
  else {
    asked[data.kind] = data;
    work().catch(fail);
  }
};

function fail(error) {
  working = false;
  self.postMessage({ kind: "error", message: error?.message ?? String(error) });
}

async function start(described) {
  about = described;
  ort = await import("./runtime/ort.wasm.min.mjs").catch(() => {
    throw new Error("runtime/ort.wasm.min.mjs is missing from this folder; export it again");
  });
  ort.env.wasm.wasmPaths = new URL("runtime/", self.location.href).href;
  ort.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
  ort.env.logLevel = "error";
  sessions = await open(await download());
  await warmUp();
  self.postMessage({ kind: "ready", threads: ort.env.wasm.numThreads });
  await work(); // what was asked meanwhile
}

/** Every file of the model, as bytes by name. */
async function download() {
  const names = about.files;
  const total = names.reduce((all, { size }) => all + size, 0);
  let loaded = 0;
  const found = {};
  for (const { name, size } of names) {
    const answer = await fetch(new URL(`model/${name}`, self.location.href));
    if (!answer.ok) throw new Error(`model/${name} is missing from this folder (${answer.status}); export it again`);
    found[name] = new Uint8Array(await answer.arrayBuffer());
    loaded += size;
    self.postMessage({ kind: "progress", loaded, total });
  }
  return found;
}

async function open(bytes) {
  const externalData = Object.keys(bytes).filter((file) => !file.endsWith(".onnx"))
    .map((path) => ({ path, data: bytes[path] }));
  const options = { executionProviders: ["wasm"], graphOptimizationLevel: "all", logSeverityLevel: 3, externalData };
  const found = {};
  for (const part of ["gate", "trunk", "dense"]) {
    const file = bytes[`${part}.onnx`];
    if (file) found[part] = await ort.InferenceSession.create(file, part === "gate" ? { ...options, externalData: [] } : options);
  }
  return found;
}

/** The first run of a session takes longer: memory is set aside in it. */
async function warmUp() {
  const zeros = new Float32Array(3 * about.size ** 2);
  await runGate(zeros);
  if (!sessions.trunk) return;
  await runTrunk(zeros, new Uint8Array(about.rows * about.columns).fill(1));
  await runDense(zeros);
}

const images = (values) => new ort.Tensor("float32", values, [1, 3, about.size, about.size]);

async function runGate(values) {
  return (await sessions.gate.run({ images: images(values) }, ["scores"])).scores.data;
}

async function runTrunk(values, mask) {
  const cells = new ort.Tensor("bool", mask, [1, about.rows, about.columns]);
  return (await sessions.trunk.run({ images: images(values), mask: cells }, ["logits"])).logits.data;
}

async function runDense(values) {
  return (await sessions.dense.run({ images: images(values) }, ["logits"])).logits.data;
}

async function timed(list, step) {
  const before = performance.now();
  const found = await step();
  list.push(performance.now() - before);
  if (list.length > KEPT) list.shift();
  return found;
}

async function work() {
  if (working || !sessions) return;
  working = true;
  let rounds = 0;
  for (;;) {
    await new Promise((resume) => setTimeout(resume)); // messages that came meanwhile
    if (asked.image) await newImage(take("image"));
    else if (asked.mask) {
      await newMask(take("mask"));
      rounds = 0;
    } else if (!denseDone) await newDense();
    else if (current && rounds < ROUNDS) {
      await round();
      rounds += 1;
    } else break;
  }
  working = false;
  self.postMessage({ kind: "idle", number });
}

function take(name) {
  const found = asked[name];
  asked[name] = null;
  return found;
}

async function newImage({ id, pixels, width, height }) {
  const box = shownBox(about, width, height);
  input = normalise(resize(pixels, width, height, box, about.size, about.interpolation), about);
  imageId = id;
  current = null;
  denseDone = !sessions.dense;
  const scores = await timed(times.gate, () => runGate(input));
  self.postMessage({ kind: "scores", id, scores: Float32Array.from(scores) });
}

async function newMask({ id, mask }) {
  if (id !== imageId) return; // of an older image
  current = mask;
  const numFine = mask.reduce((sum, value) => sum + value, 0);
  const tokens = about.tokens[numFine];
  if (sessions.trunk) {
    const logits = await timed(trunkTimes(tokens), () => runTrunk(input, mask));
    self.postMessage({ kind: "mixed", id, tokens, probabilities: softmax(logits) });
  }
  postTimes(tokens);
}

async function newDense() {
  denseDone = true;
  const logits = await timed(times.dense, () => runDense(input));
  self.postMessage({ kind: "dense", id: imageId, probabilities: softmax(logits) });
}

/** Gate, mixed and dense in turn, for their times. */
async function round() {
  const tokens = about.tokens[current.reduce((sum, value) => sum + value, 0)];
  await timed(times.gate, () => runGate(input));
  if (sessions.trunk) {
    await timed(trunkTimes(tokens), () => runTrunk(input, current));
    await timed(times.dense, () => runDense(input));
  }
  postTimes(tokens);
}

function trunkTimes(tokens) {
  if (!times.trunk.has(tokens)) times.trunk.set(tokens, []);
  return times.trunk.get(tokens);
}

function postTimes(tokens) {
  const mixed = median(times.gate) + (sessions.trunk ? median(trunkTimes(tokens)) : 0);
  self.postMessage({ kind: "times", tokens, mixed, dense: times.dense.length ? median(times.dense) : null });
}

function median(values) {
  const sorted = Float64Array.from(values).sort();
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function softmax(logits) {
  const top = logits.reduce((most, value) => Math.max(most, value), -Infinity);
  const values = Float64Array.from(logits, (value) => Math.exp(value - top));
  const sum = values.reduce((all, value) => all + value, 0);
  return values.map((value) => value / sum);
}
