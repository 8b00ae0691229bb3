"""What transformers computes for prompts with images: images.json beside the golden.json of a tiny model.

Patches are not stored: `patches` makes them, and so does the test that reads the file. `bf16_error` of a prompt is how far
transformers' own logits are off in bf16 (by norm, relative), that of an image how far its rows are."""

import copy

import numpy as np
import torch

# Ids of the tiny models' placeholder, and of what stands around it.
IMAGE, START, END, VIDEO = 5, 6, 7, 8
TOKENS = dict(image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END, video_token_id=VIDEO)

# Of each prompt: numbers of text tokens, and between them images, each a seed and a grid of patches.
PROMPTS = [
    [3, (1, (1, 4, 6)), 9],
    [1, (2, (1, 2, 2)), 2, (3, (1, 12, 4)), 5],
    # The same picture again, and the same shape with another content.
    [20, (4, (1, 4, 8)), 1, (4, (1, 4, 8)), 4, (5, (1, 4, 8)), 2],
]
NEW_TOKENS = 8


def patches(seed: int, count: int, values: int) -> np.ndarray:
    """`[count, values]`, between -1 and 1, the same in any language."""
    index = np.arange(count * values, dtype=np.int64)
    draw = (index * 7919 + seed * 104729 + (index // values) * (index % values) * 31) % 2001
    return (draw.astype(np.float32) / np.float32(1000.0) - np.float32(1.0)).reshape(count, values)


@torch.no_grad()
def cases(model, vocab_size: int, least_lead: float) -> list[dict] | None:
    """None where a greedy choice is so close that rounding could decide it."""
    random = np.random.default_rng(11)
    vision = model.config.vision_config
    rough = copy.deepcopy(model).to(torch.bfloat16)
    merge, values = vision.spatial_merge_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    found = []
    for prompt in PROMPTS:
        tokens, images = [], []
        for part in prompt:
            if isinstance(part, int):
                tokens += random.integers(10, vocab_size, part).tolist()
                continue
            seed, grid = part
            rows = grid[0] * grid[1] * grid[2] // merge**2
            tokens.append(START)
            images.append(dict(seed=seed, grid=list(grid), start=len(tokens), rows=rows))
            tokens += [IMAGE] * rows + [END]
        grids = torch.tensor([image["grid"] for image in images])
        pixels = torch.from_numpy(
            np.concatenate([patches(image["seed"], np.prod(image["grid"]), values) for image in images])
        )

        def logits(tokens: list[int], model=model) -> torch.Tensor:
            ids = torch.tensor([tokens])
            model.model.rope_deltas = None
            return model(
                ids, pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=(ids == IMAGE).int(), use_cache=False
            ).logits[0]

        prompt_logits, continuation, leads = logits(tokens), [], []
        for _ in range(NEW_TOKENS):
            top = logits(tokens + continuation)[-1].topk(2)
            leads.append(round(float(top.values[0] - top.values[1]), 4))
            # What is generated is text.
            if leads[-1] < least_lead or int(top.indices[0]) == IMAGE:
                return None
            continuation.append(int(top.indices[0]))
        features, rough_features = (rows_of_images(m, pixels, grids) for m in (model, rough))
        for index, image in enumerate(images):
            # Of each part: what merged rows are, in the order in which layers get them.
            image["features"] = [numbers(part[index]) for part in features]
            image["bf16_error"] = error(*(torch.cat([part[index] for part in parts]) for parts in (rough_features, features)))
        found.append(
            dict(
                prompt=tokens,
                images=images,
                last_logits=numbers(prompt_logits[-8:]),
                bf16_error=error(logits(tokens, rough)[-8:], prompt_logits[-8:]),
                greedy=continuation,
                leads=leads,
            )
        )
    return found


def rows_of_images(model, pixels: torch.Tensor, grids: torch.Tensor) -> list:
    tower = model.model.get_image_features(pixels, grids, return_dict=True)
    return [tower.pooler_output, *(getattr(tower, "deepstack_features", None) or [])]


def error(rough: torch.Tensor, exact: torch.Tensor) -> float:
    return float(f"{(rough.double() - exact.double()).norm() / exact.double().norm():.3g}")


def numbers(rows: torch.Tensor) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in row] for row in rows.tolist()]
