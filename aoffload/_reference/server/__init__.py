"""The HTTP server of `aoffload.integrations.openai_server`.

A request exists only in the task of its handler. There is no table of requests to maintain. When a client disconnects,
that task is cancelled and the request releases all its blocks.

    endpoint `Answering`: body -> `Wish` -> a place of `Admission` -> `Visit` around everything that may be cut short
        engine.generate -> tokens -> `Flow` -> text -> `Stream` or one object -> `Reply`
"""
