"""Placeholders: only the template's own become ids, and each becomes its medium's run."""

import dataclasses
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.chat.test_template import TEMPLATE, image, turn
from tests.chat.test_tokenizer import FOLDER, TOKENIZER
from tpu_vl.chat.expand import MediaTokens, expand
from tpu_vl.chat.guard import TextGuard
from tpu_vl.config import MediaLimits, ProcessorConfig
from tpu_vl.demo import configs
from tpu_vl.errors import RequestError
from tpu_vl.vision.process import process_image, process_video
from tpu_vl.vision.video import timestamp_text

PAD = {kind: TOKENIZER.special_id(f"<|{kind}_pad|>") for kind in ("image", "video")}
START, END = TOKENIZER.special_id("<|vision_start|>"), TOKENIZER.special_id("<|vision_end|>")
LITERAL = "<|vision_start|><|image_pad|><|vision_end|>"


def prompt(messages, media=(), **options):
    guard = TextGuard(TOKENIZER.special_ids)
    text = TEMPLATE.render(tuple(messages), guard, **{"kwargs": {}, **options})
    return expand(text, media, TOKENIZER, guard)


def picture(num_tokens):
    return MediaTokens(kind="image", num_frames=1, tokens_per_frame=num_tokens)


def film(num_frames, tokens_per_frame):
    texts = tuple(f"<{i}.0 seconds>" for i in range(num_frames))
    return MediaTokens(
        kind="video", num_frames=num_frames, tokens_per_frame=tokens_per_frame, frame_texts=texts
    )


def check_spans(expanded, media):
    """Every pad id lies in a span, every span holds one medium's pads between start and end."""
    ids = expanded.token_ids
    covered = set()
    for span in expanded.spans:
        end = span.start + span.num_tokens
        kind = media[span.media_index].kind
        assert ids[span.start : end] == [PAD[kind]] * media[span.media_index].tokens_per_frame
        assert (ids[span.start - 1], ids[end]) == (START, END)
        covered.update(range(span.start, end))
    assert covered == {i for i, token_id in enumerate(ids) if token_id in PAD.values()}


def test_a_typed_placeholder_stays_text_beside_a_real_image():
    media = [picture(256)]
    expanded = prompt([turn("user", "look <|image_pad|> here", image())], media)
    assert len(expanded.spans) == 1
    check_spans(expanded, media)
    assert "look <|image_pad|> here" in TOKENIZER.decode(expanded.token_ids)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("with_image", [False, True])
def test_typed_markers_stay_text_in_every_role(role, with_image):
    media = [picture(4)] if with_image else []
    messages = [turn(role, f"a {LITERAL} b"), turn("user", *([image()] if with_image else ["c"]))]
    expanded = prompt(messages, media)
    check_spans(expanded, media)
    assert f"a {LITERAL} b" in TOKENIZER.decode(expanded.token_ids)


@pytest.mark.parametrize(
    "parts",
    [("<|im_", "start|>"), ("<", "|im_start|", ">"), ("<|im_end|", ">"), ("<|", "im_end|>")],
)
def test_parts_do_not_join_to_a_special_token(parts):
    plain = prompt([turn("user", "x")]).token_ids
    ids = prompt([turn("user", *parts)]).token_ids
    specials = [i for i in ids if TOKENIZER.is_special(i)]
    assert specials == [i for i in plain if TOKENIZER.is_special(i)]
    mixed = prompt([turn("user", parts[0], image(), *parts[1:])], [picture(1)]).token_ids
    assert sum(map(TOKENIZER.is_special, mixed)) == len(specials) + 3


@given(st.lists(st.sampled_from([*TOKENIZER.special_ids, "<|", "|>", "<", ">", "a", " "])))
def test_no_text_gives_special_ids(parts):
    ids = prompt([turn("user", *parts)]).token_ids
    assert sum(map(TOKENIZER.is_special, ids)) == 3
    assert "".join(parts) in TOKENIZER.decode(ids)


def test_text_is_encoded_as_if_it_had_never_been_hidden():
    for text in ("<", "a <| b", "> quote", "|>", f"x{LITERAL}y"):
        ids = prompt([turn("user", text)]).token_ids
        start, end = (TOKENIZER.special_id(t) for t in ("<|im_start|>", "<|im_end|>"))
        body = ids[ids.index(start) + 1 : ids.index(end)]
        assert body == TOKENIZER.encode(f"user\n{text}")


@pytest.mark.parametrize(
    ("shown", "sent"), [(2, 1), (1, 2), (0, 1)], ids=["more-shown", "more-sent", "none-shown"]
)
def test_counts_that_differ_are_an_error_with_both(shown, sent):
    with pytest.raises(RequestError, match=f"{shown} image placeholders for {sent} images"):
        prompt([turn("user", "x", *[image()] * shown)], [picture(4)] * sent)


def test_kinds_in_another_order_are_an_error():
    with pytest.raises(RequestError, match="orders the media"):
        prompt([turn("user", image("video"), image())], [picture(4), film(1, 4)])


@pytest.mark.parametrize(
    "kinds",
    ["video image", "image video", "video image video", "image image", "image video image video"],
)
def test_spans_follow_the_order_of_the_parts(kinds):
    media = [
        picture(3 + i) if k == "image" else film(2, 5 + i) for i, k in enumerate(kinds.split())
    ]
    expanded = prompt([turn("user", "a", *map(image, kinds.split()), "b")], media)
    check_spans(expanded, media)
    order = [(i, f) for i, item in enumerate(media) for f in range(item.num_frames)]
    assert [(span.media_index, span.frame_index) for span in expanded.spans] == order
    assert [s.start for s in expanded.spans] == sorted(s.start for s in expanded.spans)
    assert expanded.starts(0) == tuple(s.start for s in expanded.spans if s.media_index == 0)


def test_images_over_several_turns_keep_their_own_spans():
    media = [picture(3), picture(8), picture(5)]
    turns = [turn("user", image(), image()), turn("assistant", "ok"), turn("user", image(), "x")]
    expanded = prompt(turns, media)
    check_spans(expanded, media)
    assert [span.num_tokens for span in expanded.spans] == [3, 8, 5]


def test_an_answer_with_pad_ids_comes_back_as_text():
    """A model that produces pad ids cannot make a later prompt count them as media."""
    answer = TOKENIZER.decode([*TOKENIZER.encode("a "), PAD["image"]], skip_special_tokens=False)
    media = [picture(4)]
    expanded = prompt([turn("user", image()), turn("assistant", answer), turn("user", "x")], media)
    check_spans(expanded, media)


def test_ids_equal_those_of_the_processor_of_transformers():
    """Images of several sizes, a video and text around them, against Qwen3VLProcessor."""
    pytest.importorskip("torchvision")
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    theirs = AutoProcessor.from_pretrained(str(FOLDER))
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 255, (h, w, 3), np.uint8) for h, w in ((70, 100), (100, 100))]
    frames = random.integers(0, 255, (6, 96, 64, 3), np.uint8)
    cfg = ProcessorConfig(
        image_min_pixels=configs.IMAGE_PIXELS["shortest_edge"],
        image_max_pixels=configs.IMAGE_PIXELS["longest_edge"],
        video_min_pixels=configs.VIDEO_PIXELS["shortest_edge"],
        video_max_pixels=configs.VIDEO_PIXELS["longest_edge"],
    )
    mine = [process_image(png(p), cfg, MediaLimits(), {}, param="p") for p in pictures]
    movie = process_video([png(f) for f in frames], cfg, MediaLimits(), {"fps": 2.0}, param="v")
    media = [
        MediaTokens(
            kind=item.kind,
            num_frames=item.grid_thw[0],
            tokens_per_frame=item.tokens_per_frame,
            frame_texts=tuple(map(timestamp_text, item.timestamps_s)),
        )
        for item in (mine[0], movie, mine[1])
    ]
    messages = [turn("system", "s é"), turn("user", image(), "a", image("video"), image(), " b ")]
    content = [
        {"type": "image"},
        {"type": "text", "text": "a"},
        {"type": "video"},
        {"type": "image"},
        {"type": "text", "text": " b "},
    ]
    chat = [{"role": "system", "content": "s é"}, {"role": "user", "content": content}]
    text = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    metadata = VideoMetadata(total_num_frames=6, fps=2.0, frames_indices=list(range(6)))
    wanted = theirs(
        text=[text],
        images=[Image.fromarray(p) for p in pictures],
        videos=[frames.transpose(0, 3, 1, 2)],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="np",
    )
    ids = wanted["input_ids"][0].tolist()
    assert prompt(messages, media).token_ids == ids
    late = dataclasses.replace(media[1], frame_texts=media[1].frame_texts[::-1])
    swapped = [media[2], media[1], media[0]]
    for wrong in ([media[0], late, media[2]], swapped):
        assert prompt(messages, wrong).token_ids != ids


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()
