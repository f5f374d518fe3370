// The models, off the page's thread.
//
// In, each with a number:
//      {kind: "start", about}                     Out: {kind: "progress", loaded, total}, {kind: "ready", threads}
//      {kind: "image", id, pixels, width, height}      {kind: "scores", id, scores}
//      {kind: "mask", id, mask}                        {kind: "mixed", id, tokens, probabilities}
//                                                      {kind: "dense", id, probabilities}
//                                                      {kind: "times", tokens, mixed, dense}: medians in ms
//                                                      {kind: "idle", number}: everything up to this message is done
//      {kind: "provider", name}                        {kind: "provider", name, note}
//      any                                             {kind: "error", message}
//
// What is asked last is done first: a newer image or mask takes the place of one that waits. When nothing waits, both
// models run in turn a few times, so that their times are of the same moment.

import { normalise, resize, shownBox } from "./resize.js";

const ROUNDS = 5; // runs of each model behind a median
const KEPT = 9; // last times of each
const PATIENCE = 30000; // ms that WebGPU may take to start
const AGREES = 1e-2; // by how much numbers of WebGPU may differ from those of WebAssembly, relative to the largest

let about, ort, bytes, sessions;
let input = null; // of the last image
let imageId = null;
let asked = { image: null, mask: null, provider: null };
let current = null; // the mask that was run last
let denseDone = true;
let working = false;
let number = 0; // of the last message
let provider = "wasm";
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
  configure(ort);
  bytes = await download();
  sessions = await open(ort, "wasm");
  await warmUp(sessions);
  self.postMessage({ kind: "ready", threads: ort.env.wasm.numThreads });
  await work(); // what was asked meanwhile
}

function configure(runtime) {
  runtime.env.wasm.wasmPaths = new URL("runtime/", self.location.href).href;
  runtime.env.wasm.numThreads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
  runtime.env.logLevel = "error";
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

async function open(runtime, name) {
  const externalData = Object.keys(bytes).filter((file) => !file.endsWith(".onnx"))
    .map((path) => ({ path, data: bytes[path] }));
  const options = { executionProviders: [name], graphOptimizationLevel: "all", logSeverityLevel: 3, externalData };
  const found = {};
  for (const part of ["gate", "trunk", "dense"]) {
    const file = bytes[`${part}.onnx`];
    if (file) found[part] = await runtime.InferenceSession.create(file, part === "gate" ? { ...options, externalData: [] } : options);
  }
  return { runtime, ...found };
}

/** The first run of a session takes longer: memory is set aside in it. */
async function warmUp(opened) {
  const zeros = new Float32Array(3 * about.size ** 2);
  await runGate(opened, zeros);
  if (!opened.trunk) return;
  await runTrunk(opened, zeros, new Uint8Array(about.rows * about.columns).fill(1));
  await runDense(opened, zeros);
}

const images = ({ runtime }, values) => new runtime.Tensor("float32", values, [1, 3, about.size, about.size]);

async function runGate(opened, values) {
  return (await opened.gate.run({ images: images(opened, values) }, ["scores"])).scores.data;
}

async function runTrunk(opened, values, mask) {
  const { runtime, trunk } = opened;
  const cells = new runtime.Tensor(about.mask_type, about.mask_type === "float32" ? Float32Array.from(mask) : mask,
    [1, about.rows, about.columns]);
  return (await trunk.run({ images: images(opened, values), mask: cells }, ["logits"])).logits.data;
}

async function runDense(opened, values) {
  return (await opened.dense.run({ images: images(opened, values) }, ["logits"])).logits.data;
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
    if (asked.provider) await changeProvider(take("provider").name);
    else if (asked.image) await newImage(take("image"));
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
  const scores = await timed(times.gate, () => runGate(sessions, input));
  self.postMessage({ kind: "scores", id, scores: Float32Array.from(scores) });
}

async function newMask({ id, mask }) {
  if (id !== imageId) return; // of an older image
  current = mask;
  const numFine = mask.reduce((sum, value) => sum + value, 0);
  const tokens = about.tokens[numFine];
  if (sessions.trunk) {
    const logits = await timed(trunkTimes(tokens), () => runTrunk(sessions, input, mask));
    self.postMessage({ kind: "mixed", id, tokens, probabilities: softmax(logits) });
  }
  postTimes(tokens);
}

async function newDense() {
  denseDone = true;
  const logits = await timed(times.dense, () => runDense(sessions, input));
  self.postMessage({ kind: "dense", id: imageId, probabilities: softmax(logits) });
}

/** Gate, mixed and dense in turn, for their times. */
async function round() {
  const tokens = about.tokens[current.reduce((sum, value) => sum + value, 0)];
  await timed(times.gate, () => runGate(sessions, input));
  if (sessions.trunk) {
    await timed(trunkTimes(tokens), () => runTrunk(sessions, input, current));
    await timed(times.dense, () => runDense(sessions, input));
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

/** WebGPU takes over only where it computes the same as WebAssembly on the present image. */
async function changeProvider(name) {
  let note = "";
  if (name === "webgpu" && provider === "wasm") note = await tryWebGpu();
  else if (name === "wasm" && provider === "webgpu") {
    sessions = await open(ort, "wasm");
    await warmUp(sessions);
    provider = "wasm";
  }
  times.gate = [];
  times.dense = [];
  times.trunk.clear();
  self.postMessage({ kind: "provider", name: provider, note });
}

async function tryWebGpu() {
  const late = new Promise((_, stop) => setTimeout(() => stop(new Error(`no result in ${PATIENCE / 1000} s`)), PATIENCE));
  try {
    const { found, apart } = await Promise.race([openWebGpu(), late]);
    if (!(apart <= AGREES)) return `WebGPU computes something else here (by ${apart.toPrecision(2)}), so WebAssembly is used.`;
    sessions = found;
    provider = "webgpu";
    return "";
  } catch (error) {
    return `WebGPU does not work here (${error?.message ?? error}), so WebAssembly is used.`;
  }
}

/** Sessions on the GPU, and how far they are from those in use. */
async function openWebGpu() {
  const runtime = await import("./runtime/ort.webgpu.min.mjs");
  configure(runtime);
  runtime.env.wasm.numThreads = 1;
  const found = await open(runtime, "webgpu");
  await warmUp(found);
  return { found, apart: await difference(sessions, found) };
}

/** The largest difference of scores and logits on the present image, relative to the largest value. */
async function difference(one, other) {
  const values = input ?? new Float32Array(3 * about.size ** 2);
  const mask = current ?? new Uint8Array(about.rows * about.columns).fill(1);
  const steps = [(opened) => runGate(opened, values)];
  if (one.trunk) steps.push((opened) => runTrunk(opened, values, mask), (opened) => runDense(opened, values));
  let apart = 0;
  for (const step of steps) {
    const [wanted, got] = [await step(one), await step(other)];
    const scale = wanted.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-6);
    wanted.forEach((value, i) => (apart = Math.max(apart, Math.abs(value - got[i]) / scale)));
    if (got.some(Number.isNaN)) return NaN;
  }
  return apart;
}
