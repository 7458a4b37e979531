"""The OpenAI front and the hand-off between prefill and decode instances.

It parses and tokenises a request once, sends its legs to instances over ZMQ, and turns the tokens that come
back into text. It runs without torch and knows nothing of KV memory beyond what `pdserve.protocol` carries.
"""

if __name__ != "pdserve.router":
    raise ImportError("import this package as pdserve.router")
