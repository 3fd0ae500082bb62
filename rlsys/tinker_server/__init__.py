"""Server of the Tinker API over this project's engines.

Users write a training loop with the `tinker` client and run it on their own models.

    client ─► app (HTTP) ─► service ─► training ──► models: a command log each ─► trainer ranks
                 ▲            ├──────► sampling_requests ─────────────────────► sampler replicas
                 │            └──────► management ─► checkpoints
                 └─ futures ◄─┘

Words of the API: a *datum* is a row of tokens with tensors for a loss; a *session* is one process
of the client, alive as long as it sends heartbeats; a *sampling session* names weights to sample
with. `service` is the API without HTTP; `backend` is the interface of trainers and samplers.
Nothing here imports Ray.
"""
