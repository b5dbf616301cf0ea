"""The ring: who is there, and what goes between them."""

from __future__ import annotations

from scripts.pictures.drawing import Picture


def draw() -> Picture:
    """Draw the processes of a ring and the way of a request through them."""
    picture = Picture(
        900,
        345,
        "The ring",
        "A client sends a prompt to the router. The router sends it to a prefill worker, which sends "
        "the first token back to the router and KV blocks to a decode worker, while it still "
        "computes. The decode worker sends the other tokens to the router, which streams all of them "
        "to the client.",
    )
    picture.box(20, 130, 90, 60, "client")
    picture.box(190, 95, 150, 130, "router\nAPIs, queue,\nplacement,\ndelivered tokens", "router")
    for number, y in enumerate((50, 150)):
        picture.box(440, y, 130, 70, f"prefill {number}\nreads prompts", "prefill")
        picture.box(740, y, 130, 70, f"decode {number}\nwrites answers", "decode")
    picture.arrow((110, 148), (186, 148))
    picture.arrow((190, 174), (114, 174))
    picture.text(148, 138, "prompt", ink="quiet")
    picture.text(148, 196, "tokens", ink="quiet")
    picture.arrow((340, 115), (390, 115), (390, 85), (436, 85), tone="router")
    picture.text(362, 74, "prompt", ink="quiet")
    picture.arrow((440, 185), (344, 185), tone="prefill")
    picture.text(392, 177, "first token", ink="quiet")
    picture.arrow((570, 85), (734, 85), tone="kv", wide=True)
    picture.arrow((570, 185), (734, 185), tone="kv", wide=True)
    picture.arrow((570, 100), (734, 170), tone="kv", dashed=True)
    picture.arrow((570, 170), (734, 100), tone="kv", dashed=True)
    picture.text(652, 70, "KV blocks", ink="quiet")
    picture.text(652, 212, "KV blocks", ink="quiet")
    picture.arrow((805, 220), (805, 262), (265, 262), (265, 229), tone="decode")
    picture.text(535, 255, "all other tokens", ink="quiet")
    picture.text(450, 304, "Each box is a process. What a lost worker had under way goes on at another one,")
    picture.text(450, 322, "from the tokens that the router has delivered.")
    return picture
