// Resizing and normalising pixels exactly as msvit.Preprocessing does in Python.
//
//   const box = shownBox(about, width, height);                        // what is shown of the photograph, in px
//   const square = resize(pixels, width, height, box, 224, "bicubic"); // RGB bytes, those of PIL's Image.resize
//   const input = normalise(square, about);                            // Float32Array, channels first
//
// A canvas resamples as it likes, and every browser differently. So the two passes of PIL are here: antialiased
// weights, rounded to 22 bits, and bytes between the passes, rows first. (Pillow 13 begins with the columns of images
// that are much taller than wide; of these, values differ in their rounding.)

const BITS = 22;
const FILTERS = {
  bilinear: { reach: 1, weight: (x) => Math.max(0, 1 - Math.abs(x)) },
  bicubic: { reach: 2, weight: cubic },
};

function cubic(value) {
  const a = -0.5;
  const x = Math.abs(value);
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
  return 0;
}

/** Left, top, right and bottom, in px, of what a model sees of an image: Preprocessing.box. */
export function shownBox(about, width, height) {
  const side = Math.min(width, height);
  const [across, down] = about.crop_mode === "squash" ? [width, height] : [side, side];
  const halves = [(about.crop * across) / width / 2, (about.crop * down) / height / 2];
  return [
    Math.max(0.5 - halves[0], 0) * width, Math.max(0.5 - halves[1], 0) * height,
    Math.min(0.5 + halves[0], 1) * width, Math.min(0.5 + halves[1], 1) * height,
  ];
}

/** For each output pixel its first input pixel and the weights of those from there on, as integers of 22 bits. */
function filterWeights(inputSize, from, to, outputSize, filter) {
  const start = Math.fround(from); // PIL keeps the box in single precision
  const scale = Math.fround(Math.fround(to) - start) / outputSize;
  const stretch = Math.max(scale, 1);
  const reach = filter.reach * stretch;
  const found = [];
  for (let i = 0; i < outputSize; i++) {
    const centre = start + (i + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - reach + 0.5));
    const last = Math.min(inputSize, Math.trunc(centre + reach + 0.5));
    const weights = new Float64Array(last - first);
    let sum = 0;
    for (let k = 0; k < weights.length; k++) {
      weights[k] = filter.weight((k + first - centre + 0.5) * (1 / stretch));
      sum += weights[k];
    }
    const whole = Int32Array.from(weights, (weight) => {
      const scaled = (sum === 0 ? weight : weight / sum) * (1 << BITS);
      return Math.trunc(scaled + (scaled < 0 ? -0.5 : 0.5));
    });
    found.push({ first, weights: whole });
  }
  return found;
}

function toByte(sum) {
  const value = sum >> BITS;
  return value < 0 ? 0 : value > 255 ? 255 : value;
}

/**
 * The box of an image as a square of `size` px. `pixels` are bytes with four channels, the result has three.
 */
export function resize(pixels, width, height, box, size, interpolation) {
  const filter = FILTERS[interpolation];
  if (!filter) throw new Error(`unknown interpolation ${interpolation}; known: ${Object.keys(FILTERS).join(", ")}`);
  const across = filterWeights(width, box[0], box[2], size, filter);
  const down = filterWeights(height, box[1], box[3], size, filter);
  const top = down[0].first;
  const bottom = down[size - 1].first + down[size - 1].weights.length;
  const half = 1 << (BITS - 1);

  const rows = new Uint8Array((bottom - top) * size * 3); // resized horizontally
  for (let y = top; y < bottom; y++) {
    for (let x = 0; x < size; x++) {
      const { first, weights } = across[x];
      let red = half, green = half, blue = half;
      for (let k = 0, at = (y * width + first) * 4; k < weights.length; k++, at += 4) {
        red += pixels[at] * weights[k];
        green += pixels[at + 1] * weights[k];
        blue += pixels[at + 2] * weights[k];
      }
      const to = ((y - top) * size + x) * 3;
      rows[to] = toByte(red);
      rows[to + 1] = toByte(green);
      rows[to + 2] = toByte(blue);
    }
  }

  const square = new Uint8Array(size * size * 3);
  for (let y = 0; y < size; y++) {
    const { first, weights } = down[y];
    for (let x = 0; x < size * 3; x++) {
      let sum = half;
      for (let k = 0, at = (first - top) * size * 3 + x; k < weights.length; k++, at += size * 3) {
        sum += rows[at] * weights[k];
      }
      square[y * size * 3 + x] = toByte(sum);
    }
  }
  return square;
}

/** RGB bytes -> normalised numbers (3, size, size), in single precision as in Python. */
export function normalise(square, about) {
  const num = square.length / 3;
  const input = new Float32Array(square.length);
  for (let channel = 0; channel < 3; channel++) {
    const mean = Math.fround(Math.fround(about.mean[channel]) * 255);
    const std = Math.fround(Math.fround(about.std[channel]) * 255);
    for (let i = 0; i < num; i++) input[channel * num + i] = Math.fround(square[3 * i + channel] - mean) / std;
  }
  return input;
}
