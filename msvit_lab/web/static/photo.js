// Photographs: from a file, the clipboard or the camera to a bitmap and its pixels.

const MAX_PIXELS = 16e6; // more than some phones can hold in one canvas

/** A bitmap of an image file. Colours are those in the file, as in Python; it is turned upright. */
export async function readFile(file) {
  if (file.type && !file.type.startsWith("image/")) {
    throw new Error(`“${file.name || "This"}” is no image but ${file.type}. Choose a JPEG, PNG or WebP.`);
  }
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  } catch {
    throw new Error(`“${file.name || "This"}” cannot be read as an image. Choose a JPEG, PNG or WebP.`);
  }
  return shrink(bitmap);
}

async function shrink(bitmap) {
  const scale = Math.sqrt(MAX_PIXELS / (bitmap.width * bitmap.height));
  if (scale >= 1) return bitmap;
  const [resizeWidth, resizeHeight] = [bitmap.width, bitmap.height].map((side) => Math.floor(side * scale));
  return createImageBitmap(bitmap, { resizeWidth, resizeHeight, resizeQuality: "high" });
}

/** Four bytes for each pixel. */
export function pixelsOf(bitmap) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  const context = canvas.getContext("2d", { willReadFrequently: true, colorSpace: "srgb" });
  context.drawImage(bitmap, 0, 0);
  return context.getImageData(0, 0, bitmap.width, bitmap.height).data;
}

/** The image among what was dropped or pasted; raises an error in words where there is none. */
export function imageAmong(transfer) {
  const files = Array.from(transfer?.files ?? []);
  const found = files.find((file) => file.type.startsWith("image/")) ?? files[0];
  if (!found) throw new Error("There is no image in it. Drop or paste a photograph, or choose a file.");
  return found;
}

/** The camera as a stream of bitmaps: `await camera.start()`, `await camera.frame()`, `camera.stop()`. */
export class Camera {
  constructor(video) {
    this.video = video;
    this.stream = null;
  }

  get on() {
    return this.stream !== null;
  }

  async start() {
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new Error("This browser gives no camera to this page: it needs https, or the address localhost.");
    }
    try {
      const wanted = { video: { facingMode: "environment", width: { ideal: 1280 } }, audio: false };
      this.stream = await navigator.mediaDevices.getUserMedia(wanted);
    } catch (error) {
      const reasons = {
        NotAllowedError: "The camera was not allowed. Allow it beside the address of this page, or choose a file.",
        NotFoundError: "There is no camera here. Choose a file instead.",
        NotReadableError: "The camera is in use by another program. Close that, or choose a file.",
      };
      throw new Error(reasons[error.name] ?? `The camera does not start (${error.message}). Choose a file instead.`);
    }
    this.video.srcObject = this.stream;
    this.video.hidden = false;
    await this.video.play();
  }

  frame() {
    return createImageBitmap(this.video);
  }

  stop() {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.stream = null;
    this.video.srcObject = null;
    this.video.hidden = true;
  }
}
