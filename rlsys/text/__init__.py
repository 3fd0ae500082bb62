"""Conversion between text and tokens, for all other packages.

    messages ── messages.py ──► plain messages ── chat_template.py ──► text
    text ── tokenizer_boundary.py ──► token ids ──► text
    untrusted text ── guarded.py ──► text without special tokens

`alphabet.py` finds characters without a token. Nothing here samples, scores or reads files.
"""
