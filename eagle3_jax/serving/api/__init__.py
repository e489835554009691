"""The OpenAI API over an engine, from request to answer:

guards.py       every request: its id, its key, its size
errors.py       OpenAI's error shape, and which exception means which status
fields.py       what a body may hold; anything else is refused (strict_json.py: what counts as JSON)
sampling.py     a body's settings as SamplingParams
messages.py     chat messages and tools to a prompt
grammar.py      response_format as a grammar over tokens
generation.py   the engine requests of one API request, merged
answer.py       Deltas to text: whole characters, stop strings, log probabilities
stops.py tools.py logprobs.py stats.py    parts of an answer
chat.py completions.py                    the two shapes an answer can have
respond.py      sends an answer, at once or as a stream
tokens.py       /tokenize, /detokenize
service.py app.py server.py               what the handlers share, the routes, the process
"""
