"""Text of an answer as it arrives: whole characters, no part of a stop string."""

from hypothesis import given
from hypothesis import strategies as st

from tests.chat.test_tokenizer import TOKENIZER
from tpu_vl.chat.detokenize import Detokenizer


def pieces(ids, **options):
    """All deltas of some ids, the last one included."""
    detokenizer = Detokenizer(TOKENIZER, **options)
    deltas = []
    for token_id in ids:
        deltas.append(detokenizer.push(token_id))
        if deltas[-1].stop is not None:
            return deltas
    return [*deltas, detokenizer.finish()]


def joined(deltas):
    return "".join(delta.text for delta in deltas)


def letters(text):
    """One token per byte."""
    return [TOKENIZER.encode(char)[0] for char in text]


@given(st.text(), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_the_pieces_are_the_text_up_to_the_first_stop(text, stops):
    text = TOKENIZER._inner.normalizer.normalize_str(text)
    deltas = pieces(TOKENIZER.encode(text), stop=tuple(stops))
    found = [text.index(stop) for stop in stops if stop in text]
    assert joined(deltas) == (text[: min(found)] if found else text)
    assert (deltas[-1].stop is not None) == bool(found)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40))
def test_any_ids_give_the_text_of_all_at_once(ids):
    assert joined(pieces(ids)) == TOKENIZER.decode(ids)
    assert sum(delta.num_released for delta in pieces(ids)) == len(ids)


def test_a_character_of_several_tokens_is_given_out_whole():
    ids = [TOKENIZER._inner.token_to_id(c) for c in ("ð", "Ł", "ĺ", "Ģ")]  # bytes of U+1F600
    texts = [delta.text for delta in pieces(ids)]
    assert texts == ["", "", "", "😀", ""]


def test_an_unfinished_character_shows_at_the_end_only():
    (first,) = TOKENIZER.encode("é")[:1]
    assert [delta.text for delta in pieces([first])] == ["", "�"]


def test_nothing_of_a_stop_string_is_given_out():
    """A stop string that arrives in four tokens: the text ends before its first letter."""
    detokenizer = Detokenizer(TOKENIZER, stop=("DEFGHIJ",))
    sent, stop = "", None
    for part in ("ABC", "DEF", "G", "HI", "J"):
        for token_id in letters(part):
            delta = detokenizer.push(token_id)
            sent, stop = sent + delta.text, delta.stop
            assert sent in ("A", "AB", "ABC")
    assert stop == "DEFGHIJ"


def test_what_was_held_back_comes_out_when_it_is_no_stop():
    deltas = pieces(letters("ABCDEFX"), stop=("DEFG",))
    assert [delta.text for delta in deltas] == ["A", "B", "C", "", "", "", "DEFX", ""]
    assert [delta.num_released for delta in deltas] == [1, 1, 1, 0, 0, 0, 4, 0]


def test_what_is_held_back_at_the_end_comes_out():
    assert joined(pieces(letters("ABDE"), stop=("DEF",))) == "ABDE"


def test_the_stop_string_stays_when_asked():
    deltas = pieces(letters("ABCD"), stop=("BC",), include_stop_str=True)
    assert joined(deltas) == "ABC"
    assert deltas[-1].stop == "BC"


def test_the_earliest_stop_wins_and_of_two_there_the_longer():
    deltas = pieces(TOKENIZER.encode("ab cd"), stop=("d", "b c", "b"))
    assert joined(deltas) == "a"
    assert pieces(letters("xab"), stop=("ab", "b"))[-1].stop == "ab"


def test_stop_strings_are_not_looked_for_in_the_first_tokens():
    deltas = pieces(letters("ABAB"), stop=("B",), min_tokens=3)
    assert joined(deltas) == "ABA"


def test_work_per_token_does_not_grow_with_the_answer():
    """What is held, and so what a push looks at, is bounded by the longest stop string."""
    stop = "ab" * 10 + "c"
    detokenizer = Detokenizer(TOKENIZER, stop=(stop,))
    for token_id in letters("ab") * 500:
        detokenizer.push(token_id)
        assert len(detokenizer._held) < len(stop)
        assert len(detokenizer._ends) < len(stop)
