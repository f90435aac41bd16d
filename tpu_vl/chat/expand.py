"""A rendered prompt to token ids: placeholders become runs of pad ids, one per merged cell."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tpu_vl.chat.guard import TextGuard
from tpu_vl.chat.tokenizer import Tokenizer
from tpu_vl.errors import RequestError
from tpu_vl.types import MediaKind, MediaSpan

_PAD = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_START, _END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, kw_only=True)
class MediaTokens:
    """How many placeholders one medium takes.

    Args:
        kind: image or video.
        num_frames: temporal groups; 1 for an image.
        tokens_per_frame: merged grid cells of one frame.
        frame_texts: the timestamp text before each frame; () for an image.
    """

    kind: MediaKind
    num_frames: int
    tokens_per_frame: int
    frame_texts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExpandedPrompt:
    """Token ids of a prompt and where each frame of each medium lies in them.

    Args:
        token_ids: real ids only.
        spans: in prompt order, one per frame.
    """

    token_ids: list[int]
    spans: tuple[MediaSpan, ...]

    def starts(self, media_index: int) -> tuple[int, ...]:
        """Prompt index of the first placeholder of each frame of one medium."""
        return tuple(span.start for span in self.spans if span.media_index == media_index)


def expand(
    text: str, media: Sequence[MediaTokens], tokenizer: Tokenizer, guard: TextGuard
) -> ExpandedPrompt:
    """Encodes a rendered prompt, its own special tokens as ids and the client's text as plain text.

    Args:
        text: what `ChatTemplate.render` gave, with the guard's marks.
        media: in prompt order.
        tokenizer: the checkpoint's.
        guard: the one that hid the client's text.

    Returns:
        Ids and spans; a frame's span is enclosed by vision_start and vision_end.

    Raises:
        RequestError: placeholders and media differ in number or order; gives both counts.

    Source: `Qwen3VLProcessor.replace_image_token`, `.replace_video_token` and
    `ProcessorMixin.get_text_with_replacements` of transformers 5.24: the pad alone is replaced, so
    a video keeps the template's outer vision_start and vision_end around its frames.
    """
    specials = sorted(tokenizer.special_ids, key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, specials)) + ")", text) if specials else [text]
    kinds = [kind for piece in pieces for kind, pad in _PAD.items() if piece == pad]
    _check_counts(kinds, media)
    ids: list[int] = []
    spans: list[MediaSpan] = []
    used = 0
    for index, piece in enumerate(pieces):
        if index % 2 == 0:
            ids.extend(tokenizer.encode(guard.restore(piece)) if piece else ())
        elif piece not in _PAD.values():
            ids.append(tokenizer.special_ids[piece])
        else:
            spans.extend(_append_medium(ids, media[used], used, tokenizer))
            used += 1
    return ExpandedPrompt(token_ids=ids, spans=tuple(spans))


def _append_medium(
    ids: list[int], medium: MediaTokens, media_index: int, tokenizer: Tokenizer
) -> list[MediaSpan]:
    pad_id = tokenizer.special_id(_PAD[medium.kind])
    spans: list[MediaSpan] = []
    for frame in range(medium.num_frames):
        if medium.kind == "video":
            ids.extend(tokenizer.encode(medium.frame_texts[frame]))
            ids.append(tokenizer.special_id(_START))
        spans.append(
            MediaSpan(
                media_index=media_index,
                frame_index=frame,
                start=len(ids),
                num_tokens=medium.tokens_per_frame,
            )
        )
        ids.extend([pad_id] * medium.tokens_per_frame)
        if medium.kind == "video":
            ids.append(tokenizer.special_id(_END))
    return spans


def _check_counts(kinds: Sequence[str], media: Sequence[MediaTokens]) -> None:
    sent = [medium.kind for medium in media]
    for kind in _PAD:
        if kinds.count(kind) != sent.count(kind):
            raise RequestError(
                f"the prompt has {kinds.count(kind)} {kind} placeholders for {sent.count(kind)} "
                f"{kind}s of the request; send each {kind} where the chat template shows it",
                param="messages",
            )
    if list(kinds) != sent:
        raise RequestError(
            f"the chat template orders the media as {list(kinds)}, the request as {sent}",
            param="messages",
        )
