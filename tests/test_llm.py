"""What LLM makes of a checkpoint: its vocabulary, its eos tokens, its length."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from tokenizers import processors
from transformers import GenerationConfig

from specpaged import LLM, SamplingParams
from specpaged.engine import kv_memory
from tests import toys

GREEDY = {"temperature": 0, "ignore_eos": True}


def test_a_draft_cannot_shrink_the_targets_vocabulary(toy_pair, tmp_path):
    toys.model(seed=3, vocab_size=200).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"has another vocabulary .*200 and 300 embedding rows"):
        LLM(toy_pair.target, speculative_config={"model": str(tmp_path / "small")}, max_model_len=64)


def test_nor_can_one_whose_tokenizer_promises_more_than_its_embedding_has(tokenizer_pair, tmp_path):
    small = tmp_path / "small"
    toys.model(seed=3, vocab_size=200).save_pretrained(small)
    toys.byte_tokenizer().save_pretrained(small)
    message = r"speculative_config\['model'\]=.* has 200 embedding rows for the target's 300 tokens; allowed: as many"
    with pytest.raises(ValueError, match=message):
        LLM(tokenizer_pair.target, speculative_config={"model": str(small)}, max_model_len=64)


def test_a_padded_embedding_is_cut_to_the_tokenizer(tmp_path):
    toys.model(vocab_size=320).save_pretrained(tmp_path)
    toys.byte_tokenizer().save_pretrained(tmp_path)
    assert LLM(str(tmp_path), max_model_len=64).engine.vocabulary.size == 300


def test_token_ids_may_have_gaps(tokenizer_pair, tmp_path):
    target = shutil.copytree(tokenizer_pair.target, tmp_path / "gap")
    vocabulary = toys.byte_tokenizer().get_vocab()
    unused = max(vocabulary, key=vocabulary.get)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    # An id in the middle is taken out, of a token that no other is merged from: 299 tokens, the last of which is 299.
    merges = tokenizer["model"]["merges"]
    parts = {part for merge in merges for part in merge}
    gap = next(m for m in reversed(merges) if "".join(m) not in parts and vocabulary["".join(m)] < 299)
    merges.remove(gap)
    del tokenizer["model"]["vocab"]["".join(gap)]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    GenerationConfig(eos_token_id=[0, vocabulary[unused], -1]).save_pretrained(target)
    llm = LLM(str(target), max_model_len=64)
    assert len(llm.tokenizer.get_vocab()) == 299
    vocab = llm.engine.vocabulary
    assert vocab.size == 300
    assert vocab.eos_token_ids == (0, vocabulary[unused])  # no token has the id -1


def test_without_a_length_or_a_memory_a_sequence_is_as_long_as_the_default_memory_allows(toy_pair, monkeypatch):
    monkeypatch.setattr(kv_memory, "DEFAULT_CPU_BYTES", 100 * 512)  # 100 tokens of a toy model
    cut = LLM(toy_pair.target, block_size=16)
    assert cut.config.max_model_len == 96
    assert "6 blocks of 16 tokens" in str(cut.report)
    assert "1 sequences of 96 tokens (max_model_len; the model has 512 positions)" in str(cut.report)
    (output,) = cut.generate(toys.prompts(1), SamplingParams(max_tokens=None, **GREEDY), use_tqdm=False)
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 96
    with pytest.raises(ValueError, match="allowed: at least one sequence of max_model_len=512"):
        LLM(toy_pair.target, max_model_len=512)


@pytest.mark.parametrize("length", [2, 3, 5, 7, 8])
@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_a_sequence_may_be_very_short(toy_pair, length, backend):
    short = LLM(toy_pair.target, max_model_len=length, attention_backend=backend)
    (output,) = short.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=None, **GREEDY), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == length - 1


# Conversations.

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if not loop.last or m.role != 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if tools %}[{{ tools[0].name }}]{% endif %}{% if loud %}!{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "user", "content": "the fox"}]
LONGER = [{"role": "system", "content": "be lazy"}, {"role": "user", "content": "jumps over the dog"}]


@pytest.fixture(scope="module")
def chat_pair(tmp_path_factory):
    """A pair whose tokenizer has a chat template, and puts a first token before whatever it encodes."""
    pair = toys.save_pair(tmp_path_factory.mktemp("chat-pair"))
    tokenizer = toys.byte_tokenizer()
    tokenizer.bos_token = "!"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="! $A", special_tokens=[("!", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = TEMPLATE
    for directory in (pair.target, pair.draft):
        tokenizer.save_pretrained(directory)
    return pair


@pytest.fixture(scope="module")
def chat_llm(chat_pair):
    return LLM(chat_pair.target, speculative_config={"model": chat_pair.draft}, max_model_len=128, max_num_seqs=4)


def chat(llm, messages, sampling_params=None, **arguments):
    params = sampling_params or SamplingParams(max_tokens=8, **GREEDY)
    return llm.chat(messages, params, use_tqdm=False, **arguments)


def test_a_conversation_is_rendered_and_answered_with_its_special_tokens_once(chat_llm):
    [output] = chat(chat_llm, HELLO)
    assert output.prompt == "!<user>the fox<|endoftext|><assistant>"
    bos = chat_llm.tokenizer.bos_token_id
    assert chat_llm.tokenizer.encode("fox")[0] == bos  # as it is with every text
    assert output.prompt_token_ids.count(bos) == 1
    assert output.prompt_token_ids == chat_llm.tokenizer.apply_chat_template(
        HELLO, add_generation_prompt=True, return_dict=False
    )
    [same] = chat_llm.generate(
        {"prompt_token_ids": output.prompt_token_ids}, SamplingParams(max_tokens=8, **GREEDY), use_tqdm=False
    )
    assert output.outputs[0].token_ids == same.outputs[0].token_ids


def test_conversations_are_answered_in_their_order_each_with_its_parameters(chat_llm):
    params = [SamplingParams(max_tokens=n, **GREEDY) for n in (3, 5, 4)]
    outputs = chat(chat_llm, [HELLO, LONGER, HELLO], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5, 4]
    assert ["<system>be lazy" in output.prompt for output in outputs] == [False, True, False]
    assert chat(chat_llm, []) == []


def test_the_final_message_can_be_gone_on_with(chat_llm):
    messages = [*HELLO, {"role": "assistant", "content": "jumps"}]
    [output] = chat(chat_llm, messages, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt.endswith("<assistant>jumps")


def test_template_tools_and_variables_reach_the_rendering(chat_llm):
    [output] = chat(chat_llm, HELLO, tools=[{"name": "look"}], chat_template_kwargs={"loud": True})
    assert output.prompt.endswith("[look]!<assistant>")
    [output] = chat(chat_llm, HELLO, chat_template="{{ messages[0].content }}, {{ messages | length }}")
    assert output.prompt == "the fox, 1"


def test_parts_of_text_are_lines_of_a_content(chat_llm):
    parts = [{"type": "text", "text": "the fox"}, {"type": "text", "text": "a dog"}]
    [output] = chat(chat_llm, [{"role": "user", "content": parts}])
    assert "<user>the fox\na dog<" in output.prompt


def test_a_tokenizer_without_a_chat_template_serves_with_one_that_is_given(tokenizer_pair):
    plain = LLM(tokenizer_pair.target, max_model_len=64)
    message = r"model='.*target' has a \w+ without a chat template; allowed: chat_template=\.\.\."
    with pytest.raises(ValueError, match=message):
        chat(plain, HELLO)
    [output] = chat(plain, HELLO, chat_template="{{ messages[0].content }}")
    assert output.prompt == "the fox"


def test_without_a_tokenizer_there_is_no_chat(toy_pair):
    with pytest.raises(ValueError, match=r"model='.*' has no tokenizer, and chat\(\) needs one; allowed: "):
        chat(LLM(toy_pair.target, max_model_len=64), HELLO, chat_template=TEMPLATE)


BAD_CONVERSATIONS = [
    ([], "messages has the conversation []; allowed: a conversation, "),
    ("hello", "messages has the conversation 'hello'; allowed: a conversation, "),
    ([{"content": "no role"}], "messages[0]={'content': 'no role'} must be a mapping with a 'role' and a 'content'"),
    ([{"role": "user"}], "messages[0]['content']=None must be text, or a list of parts of text"),
    ([*HELLO, {"role": "user", "content": 5}], "messages[1]['content']=5 must be text"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "has the part {'type': 'image_url'}; allowed: {'type': "),
    ([{"role": "user", "content": "\ud800"}], "hold a lone surrogate; allowed: text that UTF-8 can write"),
    ([{"role": "user", "content": "fox " * 200}], "max_model_len=128"),
]


@pytest.mark.parametrize(("conversation", "message"), BAD_CONVERSATIONS)
def test_a_bad_conversation_fails_alone_and_others_are_answered(chat_llm, conversation, message):
    with pytest.raises(ValueError) as refused:
        chat(chat_llm, [conversation])
    assert message in str(refused.value)
    first, bad, last = chat(chat_llm, [HELLO, conversation, LONGER])
    assert message in bad.error
    assert bad.outputs == []
    assert first.error is last.error is None
    assert len(first.outputs[0].token_ids) == len(last.outputs[0].token_ids) == 8


def test_what_a_template_raises_is_an_error_of_the_conversation_that_it_raises_for(chat_llm):
    template = "{% if messages[0].role == 'user' %}fine{% else %}{{ raise_exception('users first') }}{% endif %}"
    good, bad = chat(chat_llm, [HELLO, LONGER], chat_template=template)
    assert good.error is None
    assert re.search(r"cannot be rendered with the chat template of model='.*': TemplateError: users first", bad.error)
    with pytest.raises(ValueError, match="cannot be rendered"):
        chat(chat_llm, HELLO, chat_template="{% if")


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ("hello", {}, "messages='hello' must be a conversation, "),
        (HELLO[0], {}, "messages={'content': 'the fox', 'role': 'user'} must be a conversation, "),
        (HELLO, {"continue_final_message": True}, "allowed: continue_final_message=True with add_generation_prompt="),
        (HELLO, {"add_generation_prompt": "no"}, "add_generation_prompt='no' must be True or False"),
        (HELLO, {"chat_template": 5}, "chat_template=5 must be None or the text of a Jinja template"),
        (HELLO, {"tools": "look"}, "tools='look' must be None or a list"),
        (HELLO, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs has 'tokenize'; allowed: "),
        (HELLO, {"chat_template_kwargs": [1]}, "chat_template_kwargs=[1] must be a mapping"),
    ],
)
def test_bad_arguments_of_chat_are_refused_before_any_work(chat_llm, monkeypatch, messages, arguments, message):
    monkeypatch.setattr(chat_llm.engine, "add_request", None)
    with pytest.raises(ValueError) as refused:
        chat(chat_llm, messages, **arguments)
    assert message in str(refused.value)
