// Cells: which of them are fine, and how they are drawn over the photograph.

/** The rank of each cell by its score, 0 for the highest. Ties go to the first cell, as in Python. */
export function ranks(scores) {
  const order = Array.from(scores, (_, cell) => cell).sort((a, b) => scores[b] - scores[a] || a - b);
  const found = new Int32Array(scores.length);
  order.forEach((cell, rank) => (found[cell] = rank));
  return found;
}

/** 1 for the `num` cells that rank highest, and for those painted fine by hand; 0 for the others. */
export function makeMask(rank, num, painted) {
  const mask = Uint8Array.from(rank, (place) => (place < num ? 1 : 0));
  for (const [cell, value] of painted) mask[cell] = value;
  return mask;
}

export const sum = (mask) => mask.reduce((total, value) => total + value, 0);

/** The cell under a point of the canvas, in CSS px; null outside. */
export function cellAt(canvas, about, x, y) {
  const { width, height } = canvas.getBoundingClientRect();
  const column = Math.floor((x / width) * about.columns);
  const row = Math.floor((y / height) * about.rows);
  const inside = row >= 0 && column >= 0 && row < about.rows && column < about.columns;
  return inside ? row * about.columns + column : null;
}

/** The shown part of a photograph; coarse cells in grey with one outline, fine ones in colour with their tokens. */
export function draw(canvas, about, photo, box, mask, cursor) {
  const context = fit(canvas);
  const { width, height } = canvas;
  context.drawImage(photo, box[0], box[1], box[2] - box[0], box[3] - box[1], 0, 0, width, height);
  if (!mask) return;
  const [w, h] = [width / about.columns, height / about.rows];
  const line = Math.max(1, Math.round(width / 500));
  const cells = Array.from(mask, (fine, cell) => ({
    fine, x: Math.round((cell % about.columns) * w), y: Math.round(Math.floor(cell / about.columns) * h),
  }));
  const coarse = cells.filter((cell) => !cell.fine);
  paint(context, "saturation", "hsl(0 0% 50%)", coarse, w, h);
  paint(context, "source-over", "rgb(120 126 136 / 62%)", coarse, w, h);

  outline(context, "rgb(15 18 24 / 85%)", 2 * line, cells, w, h, 1);
  const fine = cells.filter((cell) => cell.fine);
  outline(context, "rgb(15 18 24 / 55%)", 3 * line, fine, w, h, about.coarse / about.fine);
  outline(context, "rgb(255 255 255 / 95%)", line, fine, w, h, about.coarse / about.fine);
  if (cursor !== null) {
    outline(context, "rgb(0 0 0)", 7 * line, [cells[cursor]], w, h, 1);
    outline(context, "rgb(255 214 64)", 4 * line, [cells[cursor]], w, h, 1);
  }
}

function paint(context, operation, colour, cells, w, h) {
  context.globalCompositeOperation = operation;
  context.fillStyle = colour;
  for (const { x, y } of cells) context.fillRect(x, y, Math.ceil(w), Math.ceil(h));
  context.globalCompositeOperation = "source-over";
}

/** Each cell as `parts` by `parts` squares. */
function outline(context, colour, line, cells, w, h, parts) {
  context.strokeStyle = colour;
  context.lineWidth = line;
  context.beginPath();
  for (const { x, y } of cells) {
    for (let i = 0; i <= parts; i++) {
      context.moveTo(x, y + (i * h) / parts);
      context.lineTo(x + w, y + (i * h) / parts);
      context.moveTo(x + (i * w) / parts, y);
      context.lineTo(x + (i * w) / parts, y + h);
    }
  }
  context.stroke();
}

/** As many pixels as the screen has under the canvas. */
function fit(canvas) {
  const side = Math.round(canvas.clientWidth * (window.devicePixelRatio || 1)) || 448;
  if (canvas.width !== side) canvas.width = canvas.height = side;
  return canvas.getContext("2d");
}
