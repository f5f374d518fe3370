"""A transformers model with a gate, in a pipeline: converted, saved, and used as any model of the hub.

    python examples/transformers_pipeline.py            # random weights: runs offline, in seconds
"""

import tempfile

from PIL import Image, ImageDraw
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline

import msvit

# With weights of the hub:
# vit = ViTForImageClassification.from_pretrained("google/vit-base-patch16-224")
# processor = ViTImageProcessor.from_pretrained("google/vit-base-patch16-224")
vit = ViTForImageClassification(
    ViTConfig(hidden_size=96, num_hidden_layers=2, num_attention_heads=3, intermediate_size=192, num_labels=3)
)
processor = ViTImageProcessor()  # 224 px, a multiple of the cells' 32 px

gate = msvit.load_gate("default")  # trained, comes with msvit
model = msvit.convert(vit.eval(), gate=gate.for_normalization(processor.image_mean, processor.image_std))

image = Image.new("RGB", (320, 240), "lightblue")
draw = ImageDraw.Draw(image)
for x in range(100, 220, 6):  # detail in the middle, nothing around it
    draw.line((x, 60, 320 - x, 180), fill="black", width=2)

with tempfile.TemporaryDirectory() as folder:  # or model.push_to_hub("you/name")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    classify = pipeline("image-classification", model=folder)
    for found in classify(image):
        print(f"{found['label']}  {found['score']:.3f}")

out = model(**processor(image, return_tensors="pt"))
print(f"{int(out.tokens.count)} tokens of {(224 // 16) ** 2}, {out.gate.mask.mean():.0%} of the cells fine")
