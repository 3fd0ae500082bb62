"""A server of the Tinker API over this project's engines: users write a training loop with the
`tinker` client and run it on models of their own.

    client ─► app (HTTP) ─► service ─► training ──► models: a command log each ─► trainer ranks
                 ▲            ├──────► sampling_requests ─────────────────────► sampler replicas
                 │            └──────► management ─► checkpoints
                 └─ futures ◄─┘

The API's own words: a *datum* is a row of tokens with tensors for a loss; a *session* is one
process of the client, alive as long as its heartbeats come; a *sampling session* names weights to
sample with. `service` is the API without HTTP; `backend` is the interface of trainers and samplers.
Nothing here imports Ray.
"""
