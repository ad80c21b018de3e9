"""Tokenising over HTTP, and the small endpoints that balancers, browsers and other clients ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.server.rig import BASE, MAX_LEN, Front, error_of, run

from loraplex import __version__


def test_texts_conversations_and_ids_by_the_model_that_is_asked(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        async def post(path: str, **body: Any) -> Any:
            return await front.http.post(path, json=body)

        plain = (await post("/tokenize", model=BASE, prompt="hello", return_token_strs=True)).json()
        ids = [0, *front.ids("hello")]
        assert plain == {
            "count": len(ids),
            "max_model_len": MAX_LEN,
            "tokens": ids,
            "token_strs": ["<|start|>", "hello"],
        }
        bare = (await post("/tokenize", prompt="hello", add_special_tokens=False)).json()
        assert (bare["tokens"], bare["token_strs"]) == (ids[1:], None)
        messages = [{"role": "user", "content": "hello"}]
        chat = (await post("/tokenize", messages=messages)).json()
        text = (await post("/detokenize", model=BASE, tokens=chat["tokens"])).json()
        assert text == {"prompt": "<|start|>[user]hello<|end|>[assistant]"}
        source = Path(front.source("own"))
        (source / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
        await front.http.put("/v1/adapters/own", json={"source": str(source)})
        own = (await post("/tokenize", model="own", messages=messages)).json()
        assert own["tokens"] == front.ids("<hello>")
        assert error_of(await post("/tokenize", model=BASE)) == (400, "invalid_request", "prompt")
        assert error_of(await post("/tokenize", prompt="a", messages=messages))[1] == "invalid_request"
        assert error_of(await post("/detokenize", tokens=[99999])) == (400, "token_out_of_range", "tokens")
        assert error_of(await post("/tokenize", model="nobody", prompt="a"))[1] == "model_not_found"

    run(tmp_path, test)


def test_small_endpoints_and_paths_with_a_slash_behind_them(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        assert (await front.http.get("/version")).json() == {"version": __version__}
        assert (await front.http.get("/v1/models/")).json() == (await front.http.get("/v1/models")).json()
        assert (await front.http.get("/ping")).status_code == 200
        assert (await front.http.post("/ping")).status_code == 200
        refused = await front.http.post("/v1/embeddings", json={"input": "x", "model": BASE})
        assert error_of(refused)[:2] == (404, "not_found")
        assert "embeddings are not served" in refused.json()["error"]["message"]

    run(tmp_path, test)


def test_pages_of_permitted_origins_may_call(tmp_path: Path) -> None:
    async def test(front: Front) -> None:
        ours, other = {"origin": "https://app.example"}, {"origin": "https://other.example"}
        asked = {**ours, "access-control-request-headers": "authorization,x-mine"}
        before = await front.http.options("/v1/chat/completions", headers=asked)
        assert before.status_code == 204
        assert before.headers["access-control-allow-origin"] == ours["origin"]
        assert "POST" in before.headers["access-control-allow-methods"]
        assert before.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
        answer = await front.http.get("/v1/models", headers=ours)
        assert answer.headers["access-control-allow-origin"] == ours["origin"]
        assert (
            "access-control-allow-origin" not in (await front.http.get("/v1/models", headers=other)).headers
        )

    run(tmp_path, test, cors_origins=("https://app.example",))
