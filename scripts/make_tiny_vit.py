"""Make the embedded backbone `tiny-vit`: a small ViT trained from scratch to tell letters apart.

Letters A-Z and a-z are drawn from the fonts that ship inside matplotlib, upright, and counted into 8×8 cells
of 0..16 as scikit-learn's digits are (ink in 4×4 blocks of a 32×32 bitmap). No digit is drawn, and the digits
data set, which plays the users' data in the demo, is read only after training, to print what a linear probe
reaches. Model: ViT (Dosovitskiy et al. 2021, arXiv 2010.11929) at toy size.

    python scripts/make_tiny_vit.py [--seed 0] [--steps 1500] [--output pina_flwr/models/tiny_vit.json]
"""

from __future__ import annotations

import argparse
import base64
import json
import string
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import load_file, save
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification, ViTModel

FONTS = (
    *(f"DejaVu{face}.ttf" for face in ("Sans", "Sans-Bold", "Sans-Oblique", "Sans-BoldOblique")),
    *(f"DejaVu{face}.ttf" for face in ("Serif", "Serif-Bold", "Serif-Italic", "Serif-BoldItalic")),
    *(f"DejaVuSansMono{face}.ttf" for face in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"STIXGeneral{face}.ttf" for face in ("", "Bol", "Italic", "BolIta")),
    *(f"cm{face}10.ttf" for face in ("r", "b", "ss", "tt", "ti", "mi")),
)
LETTERS = string.ascii_uppercase + string.ascii_lowercase
SAME_SHAPE = "COSUVWXZ"  # glyphs are drawn at one size, so these look like their lower case: one class
GLYPH, BITMAP, CELLS = 64, 32, 8
MEAN, STD = 0.5, 0.5
INIT_STD = 0.1  # near 1/√64; ViT's usual 0.02 wastes the first few hundred steps at this width
CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "image_size": CELLS,
    "patch_size": 2,
    "num_channels": 1,
    "qkv_bias": True,
}


def class_names() -> list[str]:
    """One name per class: every letter, but a lower case that looks like its upper case joins it."""
    return [letter for letter in LETTERS if letter.upper() not in SAME_SHAPE or letter.isupper()]


def draw_glyph(letter: str, font: ImageFont.FreeTypeFont) -> Tensor:
    """One upright letter, white on black, filling the page: (GLYPH, GLYPH) float32 in [0, 1]."""
    left, top, right, bottom = (round(edge) for edge in font.getbbox(letter))
    ink = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(ink).text((-left, -top), letter, font=font, fill=255)
    ink = ink.crop(ink.getbbox())
    scale = min(GLYPH / ink.height, 0.8 * GLYPH / ink.width)
    ink = ink.resize((max(4, round(ink.width * scale)), round(ink.height * scale)), Image.Resampling.BOX)
    page = Image.new("L", (GLYPH, GLYPH))
    page.paste(ink, ((GLYPH - ink.width) // 2, (GLYPH - ink.height) // 2))
    return torch.from_numpy(np.asarray(page, dtype=np.float32) / 255)


def draw_alphabet() -> tuple[Tensor, Tensor]:
    """Every letter in every font: glyphs (N, 1, GLYPH, GLYPH) float32 in [0, 1] and classes (N,) int64."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = class_names()
    glyphs, classes = [], []
    for name in FONTS:
        font = ImageFont.truetype(str(folder / name), 96)
        for letter in LETTERS:
            glyphs.append(draw_glyph(letter, font))
            classes.append(names.index(letter.upper() if letter.upper() in SAME_SHAPE else letter))
    return torch.stack(glyphs)[:, None], torch.tensor(classes)


def uniform(low: float, high: float, size: int, generator: torch.Generator) -> Tensor:
    """`size` draws, uniform on [low, high)."""
    return low + (high - low) * torch.rand(size, generator=generator)


def warp_grid(size: int, generator: torch.Generator) -> Tensor:
    """Sampling points (size, BITMAP, BITMAP, 2): rotation to 12°, shear, scale, shift and a smooth wobble."""
    angle = torch.deg2rad(uniform(-12, 12, size, generator))
    shear = uniform(-0.25, 0.25, size, generator)
    width, height = uniform(0.85, 1.25, size, generator), uniform(0.92, 1.1, size, generator)
    # Rows give, for an output point, the glyph point that is shown there, so scales stand inverted.
    theta = torch.stack(
        [
            torch.stack(
                [angle.cos() / width, (shear - angle.sin()) / width, uniform(-0.12, 0.12, size, generator)], 1
            ),
            torch.stack(
                [angle.sin() / height, angle.cos() / height, uniform(-0.08, 0.08, size, generator)], 1
            ),
        ],
        1,
    )
    affine = F.affine_grid(theta, [size, 1, BITMAP, BITMAP], align_corners=False)
    knots = 0.09 * torch.randn(size, 2, 4, 4, generator=generator)
    wobble = F.interpolate(knots, (BITMAP, BITMAP), mode="bicubic", align_corners=True)
    return affine + wobble.permute(0, 2, 3, 1)


def jitter(glyphs: Tensor, generator: torch.Generator) -> Tensor:
    """Glyphs (B, 1, GLYPH, GLYPH) as if by hand: uint8 (B, 1, 8, 8), round(255 · ink / 16), ink 0..16."""
    size = len(glyphs)
    bitmap = F.grid_sample(glyphs, warp_grid(size, generator), align_corners=False)
    # A threshold on blurred ink makes strokes thicker (low) or thinner (high).
    blurred = F.avg_pool2d(F.avg_pool2d(bitmap, 3, 1, 1), 3, 1, 1)
    threshold = uniform(0.15, 0.55, size, generator)[:, None, None, None]
    ink = F.avg_pool2d(((blurred - threshold) * 8 + 0.5).clamp(0, 1), BITMAP // CELLS)
    return (torch.round(16 * ink) / 16 * 255).round().to(torch.uint8)


def normalise(pixels: Tensor) -> Tensor:
    """uint8 pixels to the model's input: (x / 255 - 0.5) / 0.5, float32."""
    return (pixels.float() / 255 - MEAN) / STD


def train(seed: int, steps: int, batch: int = 256, peak: float = 4e-3) -> ViTForImageClassification:
    """Train the letter classifier: AdamW, one cycle, fresh jitter in each batch."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    glyphs, classes = draw_alphabet()
    settings = {**CONFIG, "num_labels": len(class_names()), "initializer_range": INIT_STD}
    model = ViTForImageClassification(ViTConfig(**settings)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, total_steps=steps, pct_start=0.1)
    start = time.monotonic()
    for step in range(steps):
        pick = torch.randint(len(glyphs), (batch,), generator=generator)
        logits = model(pixel_values=normalise(jitter(glyphs[pick], generator))).logits
        loss = F.cross_entropy(logits, classes[pick])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            accuracy = (logits.argmax(1) == classes[pick]).float().mean()
            seconds = time.monotonic() - start
            print(
                f"step {step + 1}/{steps}: loss {loss:.3f}, letters {accuracy:.3f}, {seconds:.0f} s",
                flush=True,
            )
    return model.eval()


def letter_accuracy(model: ViTForImageClassification, seed: int) -> float:
    """Accuracy on 20 fresh drawings of each letter in each font (the fonts of training, new jitter)."""
    generator = torch.Generator().manual_seed(seed + 1)
    glyphs, classes = draw_alphabet()
    with torch.no_grad():
        hits = [
            (model(pixel_values=normalise(jitter(glyphs, generator))).logits.argmax(1) == classes)
            .float()
            .mean()
            for _ in range(20)
        ]
    return float(torch.stack(hits).mean())


def pack(backbone: ViTModel) -> dict[str, Any]:
    """The backbone as JSON: configuration, preprocessing, and base64 safetensors of float16 tensors."""
    with tempfile.TemporaryDirectory() as folder:
        backbone.save_pretrained(folder)  # under the Hub's tensor names, whatever the release's own
        tensors = load_file(Path(folder) / "model.safetensors")
    weights = save({name: tensor.half() for name, tensor in sorted(tensors.items())})
    return {
        "config": CONFIG,
        "preprocessor": {"image_mean": [MEAN], "image_std": [STD]},
        "safetensors": base64.b64encode(weights).decode("ascii"),
    }


@torch.no_grad()
def probe(backbone: ViTModel) -> tuple[float, float]:
    """Accuracy of linear probes on the CLS features of scikit-learn's digits, each in four rotations.

    The first 1,400 images fit, the last 397 test.

    Returns:
        One probe for all rotations; the mean of one probe per rotation.
    """
    digits = load_digits()
    images = torch.from_numpy((digits.images / 16 * 255).round().astype(np.uint8))[:, None]
    turned = [torch.rot90(images, turns, dims=(2, 3)) for turns in range(4)]
    features = [backbone(pixel_values=normalise(x)).last_hidden_state[:, 0].numpy() for x in turned]
    labels, cut = digits.target, 1400

    def fit(parts: list[np.ndarray]) -> LogisticRegression:
        return LogisticRegression(max_iter=3000).fit(
            np.concatenate([p[:cut] for p in parts]), list(labels[:cut]) * len(parts)
        )

    with threadpool_limits(1):  # matrices this small go slower on several threads
        pooled = fit(features)
        shared = [pooled.score(part[cut:], labels[cut:]) for part in features]
        own = [fit([part]).score(part[cut:], labels[cut:]) for part in features]
    return float(np.mean(shared)), float(np.mean(own))


def main() -> None:
    """Train, write the JSON, print the figures of the model card."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500)
    target = Path(__file__).parents[1] / "pina_flwr" / "models" / "tiny_vit.json"
    parser.add_argument("--output", type=Path, default=target)
    options = parser.parse_args()
    # A second thread gains little at this size, and float sums depend on the number of threads.
    torch.set_num_threads(1)
    model = train(options.seed, options.steps)
    text = json.dumps(pack(model.vit))
    options.output.write_text(text, encoding="utf-8")
    print(f"{options.output}: {len(text) / 1000:.0f} kB; letters {letter_accuracy(model, options.seed):.3f}")
    shared, own = probe(model.vit)
    print(f"linear probe on digits: one for all rotations {shared:.3f}, one per rotation {own:.3f}")


if __name__ == "__main__":
    main()
