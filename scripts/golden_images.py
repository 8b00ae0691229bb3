"""What transformers computes for prompts with images: images.json beside the golden.json of a tiny model.

Patches are not stored: `patches` makes them, and so does the test that reads the file. `bf16_error` of a prompt is how far
transformers' own logits are off in bf16 (by norm, relative), that of an image how far its rows are."""

import copy

import numpy as np
import torch

# Ids of the tiny models' placeholder, and of what stands around it.
IMAGE, START, END, VIDEO = 5, 6, 7, 8
TOKENS = dict(image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END, video_token_id=VIDEO)
GEMMA3_TOKENS = dict(image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END)
# Behind each line of an image but the last, and behind the last.
BREAK = START

# Of each prompt: numbers of text tokens, and between them images, each a seed and a grid of patches.
PROMPTS = [
    [3, (1, (1, 4, 6)), 9],
    [1, (2, (1, 2, 2)), 2, (3, (1, 12, 4)), 5],
    # The same picture again, and the same shape with another content.
    [20, (4, (1, 4, 8)), 1, (4, (1, 4, 8)), 4, (5, (1, 4, 8)), 2],
]
NEW_TOKENS = 8


def patches(seed: int, count: int, pixels: int, frames: int) -> np.ndarray:
    """`[count, 3 * frames * pixels]`, between -1 and 1: of random bytes, the same in any language, and equal frames."""
    size = 3 * pixels
    index = np.arange(count * size, dtype=np.int64)
    draw = (index * 7919 + seed * 104729 + (index // size) * (index % size) * 31) % 251
    values = (draw.astype(np.float32) - np.float32(127.5)) / np.float32(127.5)
    return values.reshape(count, 3, 1, pixels).repeat(frames, axis=2).reshape(count, size * frames)


class Qwen:
    """Images of any size, in squares of patches that become one row."""

    def __init__(self, config):
        vision = config.vision_config
        self.merge, self.frames, self.side = vision.spatial_merge_size, vision.temporal_patch_size, vision.patch_size

    def patches(self, seed, count):
        return patches(seed, count, self.side**2, self.frames)

    def grid(self, grid):
        return grid

    def tokens(self, grid):
        return [START], [[IMAGE] * (grid[0] * grid[1] * grid[2] // self.merge**2)], [END]

    def inputs(self, images):
        return dict(
            pixel_values=torch.from_numpy(np.concatenate([self.patches(seed, int(np.prod(grid))) for seed, grid in images])),
            image_grid_thw=torch.tensor([grid for _, grid in images]),
        )

    def told(self, model, ids):
        model.model.rope_deltas = None
        return dict(mm_token_type_ids=(ids == IMAGE).int())

    def rows(self, model, inputs):
        tower = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
        return [tower.pooler_output, *(getattr(tower, "deepstack_features", None) or [])]


class Lines(Qwen):
    """Images whose patches lie line by line."""

    def __init__(self, config):
        vision = config.vision_config
        self.side, self.frames = vision.patch_size, 1

    def pictures(self, images):
        """`[channels, height, width]` each."""
        for seed, (_, height, width) in images:
            cut = self.patches(seed, height * width).reshape(height, width, 3, self.side, self.side)
            picture = cut.transpose(2, 0, 3, 1, 4).reshape(3, height * self.side, width * self.side)
            yield torch.from_numpy(np.ascontiguousarray(picture))


class Gemma3(Lines):
    """Squares of one size, whose rows see each other in the decoder."""

    def __init__(self, config):
        super().__init__(config)
        self.per_side = config.vision_config.image_size // self.side
        self.tokens_per_image = config.mm_tokens_per_image

    def grid(self, grid):
        return (1, self.per_side, self.per_side)

    def tokens(self, grid):
        return [START], [[IMAGE] * self.tokens_per_image], [END]

    def inputs(self, images):
        return dict(pixel_values=torch.stack(list(self.pictures(images))))

    def told(self, model, ids):
        return dict(token_type_ids=(ids == IMAGE).int())

    def rows(self, model, inputs):
        return [model.model.get_image_features(inputs["pixel_values"], return_dict=True).pooler_output]


class Mistral3(Lines):
    """Images of any size, with a token behind each line of rows."""

    def __init__(self, config):
        super().__init__(config)
        self.merge = config.spatial_merge_size

    def tokens(self, grid):
        lines, columns = grid[1] // self.merge, grid[2] // self.merge
        return [], [[IMAGE] * columns] * lines, [END]

    def inputs(self, images):
        pictures = list(self.pictures(images))
        height, width = (max(picture.shape[axis] for picture in pictures) for axis in (1, 2))
        padded = torch.zeros(len(pictures), 3, height, width)
        for to, picture in zip(padded, pictures):
            to[:, : picture.shape[1], : picture.shape[2]] = picture
        return dict(pixel_values=padded, image_sizes=torch.tensor([picture.shape[1:] for picture in pictures]))

    def told(self, model, ids):
        return {}

    def rows(self, model, inputs):
        return [model.model.get_image_features(**inputs, return_dict=True).pooler_output]


def family(model):
    of = dict(gemma3=Gemma3, mistral3=Mistral3).get(model.config.model_type, Qwen)
    return of(model.config)


@torch.no_grad()
def cases(model, vocab_size: int, least_lead: float) -> list[dict] | None:
    """None where a greedy choice is so close that rounding could decide it."""
    random = np.random.default_rng(11)
    of = family(model)
    rough = copy.deepcopy(model).to(torch.bfloat16)
    found = []
    for prompt in PROMPTS:
        tokens, images = [], []
        for part in prompt:
            if isinstance(part, int):
                tokens += random.integers(10, vocab_size, part).tolist()
                continue
            seed, grid = part[0], of.grid(part[1])
            before, lines, behind = of.tokens(grid)
            tokens += before
            image = dict(seed=seed, grid=list(grid), pixels=of.side**2, frames=of.frames, start=len(tokens), rows=sum(map(len, lines)))
            images.append(image | dict(lines=len(lines)))
            for line in lines[:-1]:
                tokens += line + [BREAK]
            tokens += lines[-1] + behind
        inputs = of.inputs([(image["seed"], image["grid"]) for image in images])

        def logits(tokens: list[int], model=model) -> torch.Tensor:
            ids = torch.tensor([tokens])
            return model(ids, **inputs, **of.told(model, ids), use_cache=False).logits[0]

        prompt_logits, continuation, leads = logits(tokens), [], []
        for _ in range(NEW_TOKENS):
            top = logits(tokens + continuation)[-1].topk(2)
            leads.append(round(float(top.values[0] - top.values[1]), 4))
            # What is generated is text.
            if leads[-1] < least_lead or int(top.indices[0]) == IMAGE:
                return None
            continuation.append(int(top.indices[0]))
        features, rough_features = (of.rows(m, inputs) for m in (model, rough))
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


def error(rough: torch.Tensor, exact: torch.Tensor) -> float:
    return float(f"{(rough.double() - exact.double()).norm() / exact.double().norm():.3g}")


def numbers(rows: torch.Tensor) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in row] for row in rows.tolist()]
