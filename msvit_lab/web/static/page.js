// The page: what is shown, and what each control does. The models run in worker.js.

import { cellAt, draw, makeMask, ranks, sum } from "./cells.js";
import { budgetText, sentence, showCost, showTimes, showTop } from "./figures.js";
import { Camera, imageAmong, pixelsOf, readFile } from "./photo.js";
import { shownBox } from "./resize.js";

const part = Object.fromEntries(Array.from(document.querySelectorAll("[id]"), (element) => [element.id, element]));
const canvas = part.cells;
const camera = new Camera(part.video);

let about; // model/about.json
let worker;
let photo = null; // {id, bitmap, box, alt}
let rank = null; // of the cells of this photograph
let ownNum = 0; // fine cells by the gate's own threshold
let wantedNum = null; // fine cells by the slider; null: the gate's own
const painted = new Map(); // cell -> 1 fine, 0 coarse
let mask = null;
let painting = false;
let stroke = null; // the value that is painted while the pointer is down
let cursor = null; // the cell under the keys
let found = { mixed: null, dense: null }; // the most probable classes
let times = { mixed: null, dense: null };
let numImages = 0;
let frameDone = null; // called when the camera may send its next frame
let numAsked = 0; // messages to the worker
let announcing = 0;

// Start

async function start() {
  if (typeof WebAssembly !== "object") {
    throw new Error("This browser has no WebAssembly, which the models need. Use a current Chrome, Firefox or Safari.");
  }
  const answer = await fetch("model/about.json");
  if (!answer.ok) throw new Error("model/about.json is missing from this folder. Write it again: msvit export --web DIR");
  about = await answer.json();
  describe();
  listen();
  worker = new Worker("worker.js", { type: "module" });
  worker.onmessage = ({ data }) => answers[data.kind](data);
  worker.onerror = (event) => showError(`The models could not be started (${event.message ?? "no reason given"}).`);
  ask({ kind: "start", about });
  await showExample(0);
}

/** "loading", "busy", "idle" (everything shown belongs together) or "error". */
function setState(state) {
  document.documentElement.dataset.state = state;
}

function ask(message, transferred = []) {
  setState("busy");
  worker.postMessage({ ...message, number: ++numAsked }, transferred);
}

function describe() {
  const parts = (about.coarse / about.fine) ** 2;
  const word = { 4: "four", 9: "nine", 16: "sixteen" }[parts] ?? String(parts);
  part.fineTokens.textContent = word;
  part.fineLegend.textContent = `${word} fine tokens`;
  part.modelName.textContent = `Model: ${about.name}, ${about.size} px.`;
  part.budget.max = about.rows * about.columns;
  part.predictions.hidden = !about.predicts;
  part.gateOnly.hidden = about.predicts;
  part.examples.replaceChildren(...about.examples.map(exampleButton));
  const credits = about.examples.map(({ credit }) => credit).filter(Boolean);
  part.credits.textContent = credits.length ? `Example photographs: ${credits.join("; ")}.` : "";
}

function exampleButton({ file, alt }, index) {
  const [button, image] = ["button", "img"].map((tag) => document.createElement(tag));
  button.type = "button";
  button.setAttribute("aria-pressed", "false");
  image.src = `examples/${file}`;
  image.alt = alt;
  button.append(image);
  button.onclick = () => attempt(() => showExample(index));
  return button;
}

// Errors are sentences above the page; the next success removes them.

function showError(message) {
  part.error.textContent = message;
  part.error.hidden = false;
  setState("error");
}

async function attempt(step) {
  try {
    part.error.hidden = true;
    await step();
  } catch (error) {
    showError(error.message);
  }
}

// Photographs

async function showExample(index) {
  const example = about.examples[index];
  if (!example) return;
  setState("busy");
  stopCamera();
  const answer = await fetch(`examples/${example.file}`);
  if (!answer.ok) throw new Error(`examples/${example.file} is missing from this folder.`);
  showPhoto(await readFile(await answer.blob()), example.alt);
  mark(index);
}

async function showFile(file) {
  setState("busy");
  stopCamera();
  showPhoto(await readFile(file), file.name ? `your photograph ${file.name}` : "your photograph");
  mark(null);
}

function mark(chosen) {
  part.examples.querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-pressed", String(i === chosen)));
}

function showPhoto(bitmap, alt) {
  photo?.bitmap.close();
  photo = { id: ++numImages, bitmap, box: shownBox(about, bitmap.width, bitmap.height), alt };
  if (!camera.on) {
    painted.clear();
    mask = null;
  }
  redraw();
  const pixels = pixelsOf(bitmap);
  ask({ kind: "image", id: photo.id, pixels, width: bitmap.width, height: bitmap.height }, [pixels.buffer]);
}

async function toggleCamera() {
  if (camera.on) return stopCamera();
  await camera.start();
  part.camera.textContent = "Stop the camera";
  part.camera.setAttribute("aria-pressed", "true");
  mark(null);
  live();
}

function stopCamera() {
  if (camera.on) camera.stop();
  part.camera.textContent = "Use the camera";
  part.camera.setAttribute("aria-pressed", "false");
}

/** Frame after frame, each when the models are done with the one before. */
async function live() {
  while (camera.on) {
    const bitmap = await camera.frame().catch(() => null);
    if (!camera.on) return bitmap?.close();
    if (bitmap) {
      const done = new Promise((resume) => (frameDone = resume));
      showPhoto(bitmap, "the camera's picture");
      await done;
    }
    await new Promise((resume) => requestAnimationFrame(resume));
  }
}

// What the worker sends

const answers = {
  progress({ loaded, total }) {
    part.loading.textContent = `Loading the model, ${(loaded / 1e6).toFixed(0)} of ${(total / 1e6).toFixed(0)} MB …`;
  },
  ready({ threads }) {
    part.loading.hidden = true;
    part.budget.disabled = false;
    part.device.dataset.threads = threads;
    showDevice();
  },
  scores({ id, scores }) {
    if (id !== photo.id) return;
    rank = ranks(scores);
    ownNum = scores.filter((score) => score > 0).length;
    found = { mixed: null, dense: null };
    update();
  },
  mixed({ id, probabilities }) {
    if (id === photo.id) found.mixed = showTop("mixedTop", about, probabilities);
    announce();
  },
  dense({ id, probabilities }) {
    if (id === photo.id) found.dense = showTop("denseTop", about, probabilities);
    nextFrame();
    announce();
  },
  times({ tokens, mixed, dense }) {
    if (!mask || tokens !== about.tokens[sum(mask)]) return; // of a mask before
    times = { mixed, dense };
    showTimes(mixed, dense);
    if (!about.predicts) nextFrame();
    announce();
  },
  idle({ number }) {
    if (number !== numAsked) return; // more was asked meanwhile
    writeSummary();
    setState("idle");
  },
  error({ message }) {
    showError(`The model could not be run (${message}).`);
    nextFrame();
  },
};

function showDevice() {
  const threads = Number(part.device.dataset.threads);
  const what = about.predicts ? "Medians of both models in turn, the gate included" : "Median time of the gate";
  part.device.textContent = `${what}: WebAssembly, ${threads} thread${threads === 1 ? "" : "s"}.`;
}

function nextFrame() {
  frameDone?.();
  frameDone = null;
}

// The mask: by the gate and the slider, then by hand

function update() {
  if (!rank) return;
  const num = wantedNum ?? ownNum;
  mask = makeMask(rank, num, painted);
  part.budget.value = num;
  const numFine = sum(mask);
  part.budgetText.textContent = budgetText(about, numFine);
  part.budget.setAttribute("aria-valuetext", budgetText(about, numFine));
  times = { mixed: null, dense: times.dense };
  showCost(about, numFine);
  redraw();
  ask({ kind: "mask", id: photo.id, mask });
  announce();
}

function setCell(cell, value) {
  if (cell === null || !mask || mask[cell] === value) return;
  painted.set(cell, value);
  update();
}

function reset() {
  painted.clear();
  wantedNum = null;
  update();
}

function redraw() {
  if (!photo) return;
  const shown = painting || document.activeElement === canvas ? cursor : null;
  draw(canvas, about, photo.bitmap, photo.box, mask, shown);
  const fine = mask ? `, ${sum(mask)} of ${mask.length} cells fine` : "";
  canvas.setAttribute("aria-label", `${photo.alt}${fine}${cursor === null ? "" : `. ${cellName()}`}`);
}

function cellName() {
  const [row, column] = [Math.floor(cursor / about.columns) + 1, (cursor % about.columns) + 1];
  return `Row ${row}, column ${column}: ${mask?.[cursor] ? "fine" : "coarse"}`;
}

/** The sentence, once figures have come to rest: a screen reader would otherwise never stop. */
function announce() {
  clearTimeout(announcing);
  announcing = setTimeout(writeSummary, 250);
}

function writeSummary() {
  clearTimeout(announcing);
  if (!mask) return;
  const text = sentence(about, showCost(about, sum(mask)), found, times.mixed, times.dense);
  if (part.summary.textContent !== text) part.summary.textContent = text;
}

// Controls

function listen() {
  part.file.onchange = () => {
    const [file] = part.file.files;
    if (file) attempt(() => showFile(file));
    part.file.value = "";
  };
  part.camera.onclick = () => attempt(toggleCamera);
  part.reset.onclick = reset;
  part.paint.onclick = () => setPainting(!painting);
  part.budget.oninput = () => {
    wantedNum = Number(part.budget.value);
    update();
  };
  new ResizeObserver(redraw).observe(canvas);
  listenForDrops();
  listenToPointer();
  listenToKeys();
}

function setPainting(on) {
  painting = on;
  part.paint.setAttribute("aria-pressed", String(on));
  canvas.classList.toggle("painting", on);
  redraw();
}

function listenForDrops() {
  let depth = 0; // of elements under the pointer
  const show = (on) => (part.dropHint.hidden = !on);
  addEventListener("dragenter", () => show(++depth > 0));
  addEventListener("dragleave", () => show(--depth > 0));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    show(false);
    attempt(() => showFile(imageAmong(event.dataTransfer)));
  });
  addEventListener("paste", (event) => attempt(() => showFile(imageAmong(event.clipboardData))));
}

function listenToPointer() {
  const cell = (event) => {
    const { left, top } = canvas.getBoundingClientRect();
    return cellAt(canvas, about, event.clientX - left, event.clientY - top);
  };
  canvas.onpointerdown = (event) => {
    if (!painting || !mask) return;
    canvas.setPointerCapture(event.pointerId);
    cursor = null;
    stroke = 1 - mask[cell(event)];
    setCell(cell(event), stroke);
  };
  canvas.onpointermove = (event) => {
    if (stroke !== null) setCell(cell(event), stroke);
  };
  canvas.onpointerup = canvas.onpointercancel = () => (stroke = null);
}

function listenToKeys() {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  canvas.onfocus = () => {
    if (canvas.matches(":focus-visible")) cursor ??= 0;
    redraw();
  };
  canvas.onblur = redraw;
  canvas.onkeydown = (event) => {
    if (!mask) return;
    if (steps[event.key]) {
      const [down, right] = steps[event.key];
      const row = Math.floor((cursor ?? 0) / about.columns) + down;
      const column = ((cursor ?? 0) % about.columns) + right;
      if (row < 0 || column < 0 || row >= about.rows || column >= about.columns) return;
      cursor = row * about.columns + column;
      redraw();
    } else if (event.key === " " || event.key === "Enter") setCell((cursor ??= 0), 1 - mask[cursor]);
    else return;
    event.preventDefault();
  };
}

attempt(start);
