"""The boundary between text and tokens. Every other package encodes, decodes and renders here.

    messages ── messages.py ──► plain messages ── chat_template.py ──► text
    text ── tokenizer_boundary.py ──► token ids ──► text
    text of others ── guarded.py ──► text in which no special token is found

`alphabet.py` finds characters that a tokenizer has no token for. Nothing here samples, scores or
reads files.
"""
