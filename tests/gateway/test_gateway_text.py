"""From tokens to text: detokenizing, stop strings and the fold, without a bus."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gateway.chat_template import ChatTemplate
from gateway.detokenize import TokenText
from gateway.fold import ChoiceEnd, Done, Event, EventId, ResponseFold, TextEvent, Usage
from gateway.model_folder import load_model_folder
from gateway.sse import Renderer, parse_event_id
from gateway.stopping import StopMatcher
from shared.errors import ConfigError, InvalidRequest
from shared.ids import RequestId
from shared.log import FinishEntry, LogEntry, Logprobs, TokenEntry
from shared.messages import RequestBody, SamplingParams
from tests.gateway.tiny_model import END, make_model_folder, make_tokenizer

TINY = make_tokenizer()
VOCAB = TINY.get_vocab_size(with_added_tokens=True)
END_ID = TINY.token_to_id(END)
EMOJI = "🌍你ь👩‍👩‍👧"


@pytest.fixture(scope="module")
def token_text(tmp_path_factory: pytest.TempPathFactory) -> TokenText:
    return TokenText(load_model_folder(make_model_folder(tmp_path_factory.mktemp("m") / "tiny")))


@pytest.mark.parametrize("source", ["{{ raise_exception('no: ' + messages[0]['content']) }}",
                                    "{{ {}[messages[0]['content']].x }}"])  # fmt: skip
def test_a_templates_refusal_repeats_little(source: str) -> None:
    """What a template says of a message, itself or by failing, should be short, however long the message is."""
    template = ChatTemplate(source, {}, [])
    with pytest.raises(InvalidRequest) as caught:
        template.render([{"role": "user", "content": "x" * 100_000}])
    assert caught.value.message.startswith("messages: ")
    assert len(caught.value.message) < 600


def sentencepiece_folder(path: Path, *, strips: bool) -> Path:
    """A model whose tokenizer falls back to bytes, as Llama 2's."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "你"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    make_model_folder(path)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def pieces_of(token_text: TokenText, ids: list[int]) -> list[str]:
    detokenizer = token_text.new_detokenizer()
    return [*(detokenizer.feed(id_) for id_ in ids), detokenizer.finish()]


@given(st.lists(st.integers(0, VOCAB + 5), max_size=40))
@settings(max_examples=300, deadline=None)
def test_pieces_join_to_what_the_tokenizer_decodes(token_text: TokenText, ids: list[int]) -> None:
    """For any ids, whole characters or not, control tokens and unknown ids, the text should be the tokenizer's own."""
    known = [id_ for id_ in ids if id_ < VOCAB]
    assert "".join(pieces_of(token_text, ids)) == TINY.decode(known, skip_special_tokens=True)


@pytest.mark.case(58)
def test_characters_are_never_broken(token_text: TokenText) -> None:
    """A character should come whole, with its last byte; only bytes that are no UTF-8 may become U+FFFD."""
    ids = TINY.encode(EMOJI).ids
    assert len(ids) > len(EMOJI)
    pieces = pieces_of(token_text, ids)
    assert "".join(pieces) == EMOJI
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces_of(token_text, ids[:1]) == ["", "\ufffd"]


@pytest.mark.parametrize("strips", [True, False])
def test_byte_fallback_tokens_join(tmp_path: Path, strips: bool) -> None:
    """SentencePiece decoders should give the tokenizer's text too, with and without the stripped first space."""
    folder = load_model_folder(sentencepiece_folder(tmp_path / "sp", strips=strips))
    token_text = TokenText(folder)
    for text in (f"the cats {EMOJI} the", "你", "cats"):
        ids = folder.tokenizer.encode(text).ids
        pieces = pieces_of(token_text, ids)
        assert "".join(pieces) == folder.tokenizer.decode(ids)
        assert len([piece for piece in pieces if piece]) > 1 or len(text) == 1


def test_other_decoders_use_a_window(tmp_path: Path) -> None:
    """A decoder that does more than join bytes should still give the tokenizer's text, piece by piece."""
    path = make_model_folder(tmp_path / "wp")
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "the": 3, "##s": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.save(str(path / "tokenizer.json"))
    folder = load_model_folder(path)
    ids = folder.tokenizer.encode("the plays playing the").ids
    pieces = pieces_of(TokenText(folder), ids)
    assert "".join(pieces) == folder.tokenizer.decode(ids) == "the plays playing the"
    assert pieces[0] == "the"


def test_the_inert_tokenizer_is_the_tokenizer_but_for_control_tokens(tmp_path: Path) -> None:
    """It should give the ids that the library gives with the file's tokenizer told to take no control tokens."""
    made = make_tokenizer()
    made.normalizer = normalizers.Lowercase()
    made.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, END_ID)])
    made.add_tokens([AddedToken("Cats", normalized=True), AddedToken("[x]", normalized=False, lstrip=True)])
    path = make_model_folder(tmp_path / "tiny")
    made.save(str(path / "tokenizer.json"))
    expected = Tokenizer.from_file(str(path / "tokenizer.json"))
    expected.encode_special_tokens = True
    folder = load_model_folder(path)
    for text in (f"The CATS {END} [x]", f"a [x]b{END}", EMOJI):
        for adds in (True, False):
            actual = folder.inert_tokenizer.encode(text, add_special_tokens=adds)
            assert expected.encode(text, add_special_tokens=adds).ids == actual.ids
    assert folder.tokenizer.encode(END).ids == [END_ID, END_ID]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "must hold a JSON object"),
    ],
)
def test_a_broken_file_of_the_model_is_named(tmp_path: Path, file: str, content: str, words: str) -> None:
    """A model folder with a file that cannot be understood should be refused with its path and what it is not."""
    path = make_model_folder(tmp_path / "broken")
    (path / file).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_model_folder(path)
    assert str(caught.value).startswith(f"{path / file}")
    assert words in str(caught.value)


def test_names_of_tokens_never_hold_replacement_characters(token_text: TokenText) -> None:
    """In logprobs a part of a character should be spelled by its bytes."""
    first = TINY.encode("🌍").ids[0]
    assert token_text.token_name(first) == "bytes:\\xf0"
    assert token_text.token_bytes(first) == b"\xf0"
    assert token_text.token_name(END_ID) == END


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
       st.data())  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_stop_strings_are_found_wherever_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    """The shown text should end before the stop string that is complete first, and never hold a beginning of one."""
    matcher, shown, position, is_stopped = StopMatcher(stops), "", 0, False
    while position < len(text) and not is_stopped:
        size = data.draw(st.integers(1, 4))
        piece, is_stopped = matcher.feed(text[position : position + size], is_armed=True)
        shown, position = shown + piece, position + size
        assert not is_stopped or shown == _cut(text, stops)
        held = text[len(shown) : position]
        assert is_stopped or held == "" or any(stop.startswith(held) for stop in stops)
    assert is_stopped == (_cut(text, stops) != text or any(text.endswith(stop) for stop in stops))
    if not is_stopped:
        assert shown + matcher.finish() == text


def _cut(text: str, stops: list[str]) -> str:
    """By the definition: the first end of any stop string; of those with that end, the longest."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            return text[: end - max(map(len, matches))]
    return text


def make_body(**fields: object) -> RequestBody:
    sampling = {"seed": 1, "max_tokens": 100, "stop_token_ids": (END_ID,)}
    sampling |= {key: fields.pop(key) for key in ("min_tokens", "num_logprobs") if key in fields}
    defaults = {"kind": "completion", "model": "tiny", "created": 0, "prompts": ((1, 2, 3),), "n": 1}
    return RequestBody(**(defaults | fields), sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def log_of(text: str | list[int], *, reason: str = "stop", choice: int = 0) -> list[LogEntry]:
    ids = TINY.encode(text).ids if isinstance(text, str) else text
    entries: list[LogEntry] = [TokenEntry(choice, id_, Logprobs(-float(i))) for i, id_ in enumerate(ids)]
    if reason == "stop":
        entries.append(TokenEntry(choice, END_ID))
    return [*entries, FinishEntry(choice, reason)]


def fold(token_text: TokenText, body: RequestBody, log: list[LogEntry]) -> list[Event]:
    return [event for _, event in ResponseFold(body, token_text).feed(log)]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextEvent))


TEXT = "hello world, this is the text"


@pytest.mark.case(31, 32)
def test_no_beginning_of_a_stop_string_leaks(token_text: TokenText) -> None:
    """For every cut of the text, the deltas should join to what precedes the stop string, and the choice end."""
    for start in range(len(TEXT) - 6):
        stop = TEXT[start : start + 6]
        body = make_body(stop=(stop,))
        events = fold(token_text, body, log_of(TEXT))
        assert text_of(events) == TEXT[: TEXT.index(stop)]
        assert [event for event in events if isinstance(event, ChoiceEnd)] == [ChoiceEnd(0, "stop")]


@pytest.mark.case(31)
def test_what_is_after_a_stop_string_is_void(token_text: TokenText) -> None:
    """Tokens logged past the match should change neither text nor usage, and the match name its entry."""
    body, log = make_body(stop=("world",)), log_of(TEXT)
    response = ResponseFold(body, token_text)
    events = [event for _, event in response.feed(log)]
    assert response.take_stops() == [(0, 1)]
    assert response.take_stops() == []
    assert response.usage == Usage(3, 2)
    assert events[-1] == Done()


def test_a_text_that_only_begins_a_stop_string_is_shown_at_the_end(token_text: TokenText) -> None:
    """What was held back should come out when the choice ends without a match."""
    for reason in ("stop", "length"):
        events = fold(token_text, make_body(stop=("text!",)), log_of(TEXT, reason=reason))
        assert text_of(events) == TEXT
        assert events[-2] == ChoiceEnd(0, reason)


@pytest.mark.case(35)
def test_min_tokens_holds_against_stop_strings(token_text: TokenText) -> None:
    """A match within the first `min_tokens` tokens should not end; one that a later token completes should."""
    ids = TINY.encode("hhhhhhhhh").ids
    assert len(ids) == 9
    assert text_of(fold(token_text, make_body(stop=("h",), min_tokens=5), log_of(ids))) == "hhhhh"
    assert text_of(fold(token_text, make_body(stop=("hhhhhhh",), min_tokens=6), log_of(ids))) == ""
    assert text_of(fold(token_text, make_body(stop=("h",)), log_of(ids))) == ""


@pytest.mark.case(15)
def test_the_end_token_is_never_visible(token_text: TokenText) -> None:
    """The end token, also one that is an ordinary token, should have no text, and count as a token."""
    body = make_body()
    assert text_of(fold(token_text, body, log_of("hi"))) == "hi"
    letter = TINY.encode("x").ids[0]
    body = RequestBody(kind="completion", model="tiny", created=0, prompts=((1,),), n=1,
                       sampling=SamplingParams(seed=1, max_tokens=9, stop_token_ids=(letter,)))  # fmt: skip
    log = [*log_of("hi", reason="length")[:-1], TokenEntry(0, letter), FinishEntry(0, "stop")]
    response = ResponseFold(body, token_text)
    assert text_of([event for _, event in response.feed(log)]) == "hi"
    assert response.usage.completion_tokens == len(log) - 1


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_events_do_not_depend_on_packets(token_text: TokenText, data: st.DataObject) -> None:
    """However the log is cut, events and ids should be the same, and the ids rise strictly."""
    body = make_body(n=2, stop=("the",), kind="chat", include_usage=True, num_logprobs=0)
    first, second = log_of(TEXT, choice=0), log_of(EMOJI + TEXT, choice=1, reason="length")
    log: list[LogEntry] = []
    while first or second:
        source = first if first and (not second or data.draw(st.booleans())) else second
        log.append(source.pop(0))
    whole = ResponseFold(body, token_text).feed(log)
    cut, pieces = ResponseFold(body, token_text), list(log)
    found: list[tuple[EventId, Event]] = []
    while pieces:
        size = data.draw(st.integers(1, 5))
        found += cut.feed(pieces[:size])
        del pieces[:size]
    assert found == whole
    ids = [event_id for event_id, _ in whole]
    assert ids == sorted(set(ids))
    assert isinstance(whole[-1][1], Done)


def test_logprobs_do_not_run_ahead_of_the_text(token_text: TokenText) -> None:
    """Tokens of held-back text should be named only with it, and those of a stop string never."""
    body = make_body(stop=("world",), num_logprobs=0)
    events = fold(token_text, body, log_of("hello world"))
    tokens = [token for event in events if isinstance(event, TextEvent) for token in event.tokens]
    names = [token_text.token_name(token.token_id) for token in tokens]
    assert "".join(names).startswith("hello")
    assert text_of(events) == "hello "
    assert tokens[-1].text_offset < len("hello ")


@pytest.mark.case(60)
def test_each_frame_is_whole(token_text: TokenText) -> None:
    """Each SSE frame should be whole UTF-8 JSON by itself, however characters were split over tokens."""
    body = make_body(kind="chat")
    renderer = Renderer(RequestId("chatcmpl-0"), body, token_text)
    text = ""
    for event_id, event in ResponseFold(body, token_text).feed(log_of(EMOJI)):
        head, data = renderer.frame(event_id, event).decode().strip().split("\n")
        assert head == f"id: {event_id.entries}.{event_id.number}"
        if not isinstance(event, Done):
            text += orjson.loads(data.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
    assert text == EMOJI


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "a.b", "-1.0", "1.0.0", "1.0\n", "9" * 30 + ".0", "١.٠"])
def test_other_event_ids_are_refused(text: str) -> None:
    """Only `entries.number` should pass as an event id."""
    with pytest.raises(InvalidRequest):
        parse_event_id(text)
    assert parse_event_id("12.3") == EventId(12, 3)
