"""The chat template of a model's folder: the text is the one that transformers makes."""
import json
import shutil

import pytest
from conftest import INSTALL, ROOT, refusal

from lab.harness.chat_template import QWEN, chat_template, prompt_of

QWEN2_5 = (  # its beginning and its end
    "{%- if messages[0]['role'] == 'system' %}\n    {{- '<|im_start|>system\\n' + messages[0]"
    "['content'] + '<|im_end|>\\n' }}\n{%- else %}\n    {{- '<|im_start|>system\\nYou are Qwen."
    "<|im_end|>\\n' }}\n{%- endif %}\n{%- for message in messages %}\n    {%- if (message.role == "
    "\"user\") or (message.role == \"assistant\" and not message.tool_calls) %}\n        {{- "
    "'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n    "
    "{%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- "
    "'<|im_start|>assistant\\n' }}\n{%- endif %}\n")
OTHERS = (
    "{% for m in messages %}{{ bos_token }}{{ m.content | trim }}{{ eos_token }}\n{% endfor %}",
    "{% for m in messages %}\n  {% if loop.index > 2 %}\n    {% break %}\n  {% endif %}\n"
    "{{ m | tojson }}\n{% endfor %}")
ASKED = [{"role": "user", "content": " one \u00e9 <b>"}, {"role": "assistant", "content": "two"},
         {"role": "user", "content": "three"}]


def folder_with(tmp_path, template, in_file=False):
    """A folder whose template stands in tokenizer_config.json, or in a file of its own."""
    config = json.loads((ROOT / "models/tiny/tokenizer_config.json").read_text())
    config["bos_token"] = {"__type": "AddedToken", "content": "<|im_start|>", "special": True}
    if in_file:
        (tmp_path / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(ROOT / "models/tiny/tokenizer.json", tmp_path)
    shutil.copy(ROOT / "models/tiny/config.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("template", [QWEN2_5, *OTHERS])
def test_the_text_is_that_of_transformers(tmp_path, template, in_file):
    transformers = pytest.importorskip("transformers", reason=INSTALL)
    folder = folder_with(tmp_path, template, in_file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    theirs = tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert prompt_of(ASKED, folder) == theirs


@pytest.mark.parametrize("begun", ["Let me see.\n<think>", "so \n"])
@pytest.mark.parametrize("template", [QWEN2_5, OTHERS[0], None])
def test_an_answer_goes_on_from_the_assistants_last_message(tmp_path, template, begun):
    transformers = pytest.importorskip("transformers", reason=INSTALL)
    folder, messages = tmp_path, [*ASKED, {"role": "assistant", "content": begun}]
    folder_with(folder, template or QWEN)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    theirs = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert prompt_of(messages, folder if template else None) == theirs


def test_a_prompt_by_hand_a_field_that_is_none_and_one_of_several_templates(tmp_path):
    several = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    assert prompt_of([], folder_with(tmp_path, several)) == "b"
    folder = folder_with(tmp_path, QWEN2_5)
    assert prompt_of([{"role": "user", "content": "hi", "tool_calls": None}], folder) == (
        "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n")


def test_a_folder_without_a_template_and_messages_that_one_does_not_take(tmp_path):
    assert chat_template(ROOT / "models/tiny") == QWEN
    for without in (ROOT / "models/tiny", None):
        assert prompt_of(ASKED[1:], without) == (
            "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n"
            "<|im_start|>assistant\n")
    folder = folder_with(tmp_path, "{{ raise_exception('users alone') }}")
    assert refusal(prompt_of, ASKED, folder) == (
        f"the chat template of {folder} takes no such messages: users alone")
    assert "takes no such messages" in refusal(prompt_of, ["text"], folder)


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"])
def test_a_template_runs_nothing_of_pythons(tmp_path, template):
    assert "takes no such messages" in refusal(prompt_of, ASKED, folder_with(tmp_path, template))
