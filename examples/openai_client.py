"""Completions of a server as the README starts it, one whole and one streamed: `python examples/openai_client.py`."""

import openai

client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
request = {"model": "embedded", "max_tokens": 64, "temperature": 0.8, "seed": 7}

whole = client.completions.create(prompt="def main(argv):\n", **request)
print(whole.choices[0].text)

# The same seed without speculation: the same text.
plain = client.completions.create(
    prompt="def main(argv):\n", extra_body={"vllm_xargs": {"num_speculative_tokens": 0}}, **request
)
print("identical without drafts:", plain.choices[0].text == whole.choices[0].text)

for chunk in client.completions.create(prompt="class Queue:\n", stream=True, **request):
    print(chunk.choices[0].text, end="", flush=True)
print()
