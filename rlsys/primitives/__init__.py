"""A server of the Tinker API over this project's engines: whoever writes a training loop against
the `tinker` client runs it against models of their own.

    client ─► app (HTTP) ─► service ─► command log, a model ─► trainer ranks
                 ▲            │        waiting samples ──────► sampler replicas
                 └─ futures ◄─┘

The API's own words: a *datum* is a row of tokens with tensors for a loss; a *session* one process
of the client, alive as long as its heartbeats come; a *sampling session* some weights to sample
with. `service` is the API without HTTP, `backend` what it asks of the machinery behind it; nothing
here knows Ray.
"""
