"""Prompts for the exactness tests: conversations, code, tables, many scripts, odd white space, and long texts."""

from __future__ import annotations

CONVERSATIONS = [
    "Hi! Can you help me plan a three day trip to Lisbon with two small children?",
    "What's the difference between a llama and an alpaca? Keep it short.",
    "I keep waking up at 4am and can't fall back asleep. What should I try first?",
    "Write a polite email to my landlord about a broken heater. It has been cold since Monday.",
    "Explain photosynthesis to a ten year old.",
    "My sourdough starter smells like nail polish remover. Is it dead?",
    "Give me five names for a coffee shop run by two sisters.",
    "How do I tell my manager that I'm overloaded without sounding lazy?",
    "Summarise the plot of Moby Dick in three sentences.",
    "Is it cheaper to heat one room with an electric heater or the whole flat with gas?",
    "Translate to French: The meeting was moved to Thursday because nobody could come on Tuesday.",
    "What year did the first person walk on the Moon, and who was it?",
    "User: I lost my passport in Rome.\nAssistant: Sorry to hear that. Where are you from?\nUser: Canada. What now?",
    "List the planets from the Sun outwards, one per line.",
    "Why is the sky blue and the sunset red?",
    "Tell me a joke about a programmer and a rubber duck.",
    "What are the symptoms of dehydration?",
    "Compare renting and buying a house for someone who moves every three years.",
    "Continue the story: The lighthouse keeper had not spoken to anyone for eleven days when",
    "Rewrite this more formally: hey, can u send me the thing asap, thx",
]

CODE = [
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "Write a Python function that checks whether a string is a palindrome, ignoring case and punctuation.",
    "SELECT customer_id, SUM(total) FROM orders WHERE created_at > '2024-01-01' GROUP BY",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "What does this do?\n\n```python\nprint([x ** 2 for x in range(10) if x % 2])\n```",
    "fn main() {\n    let mut v: Vec<u32> = Vec::new();\n    v.push(3);\n",
    'git commit -m "fix: handle empty input" && git push origin main # explain each part',
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "notes": {',
    "const sum = (a, b) => a + b;\n// write three tests for this function\n",
    "<html>\n  <head><title>Hello</title></head>\n  <body>\n    <h1>",
]

SCRIPTS = [
    "请用三句话介绍一下北京的历史。",
    "日本の首都はどこですか？また、その人口はどのくらいですか。",
    "안녕하세요! 오늘 날씨가 어때요?",
    "Привет! Расскажи мне, пожалуйста, сказку о колобке.",
    "مرحبا، كيف حالك اليوم؟ ما هي عاصمة مصر؟",
    "שלום, מה שלומך? ספר לי על ירושלים.",
    "नमस्ते, आप कैसे हैं? दिल्ली के बारे में बताइए।",
    "Γειά σου Κόσμε! Τι είναι η φιλοσοφία;",
    "Größe, Straße, Äpfel und Übermut: erkläre die Umlaute.",
    "¿Cuál es la capital de España y qué puedo visitar allí en un fin de semana?",
    "สวัสดีครับ วันนี้อากาศเป็นอย่างไรบ้าง",
]

EMOJI = [
    "🎉🎂🎈 Write a birthday card for my friend 👩🏽‍🚀 who loves 🚀 and 🍕!",
    "What does 🤷‍♀️ mean? And 🏳️‍🌈? And 👨‍👩‍👧‍👦?",
    "😀😃😄😁😆😅🤣😂 describe each of these",
    "Rate my lunch: 🥗🍣🍜 → 10/10? ✅❌",
]

ODD = [
    "1234567890 9876543210 3.14159265358979 0x1F600 1e-10 1,000,000",
    "   leading spaces,\ttabs\t\tand\n\n\nblank lines   \n",
    "a",
    "The number of tokens in    this     sentence      depends       on        white         space.",
    "e\u0301 is not \u00e9; \u212b is not \u00c5; \ufb01 is a ligature; \u200bzero width\u200b.",
    "| a | b | c |\n|---|---|---|\n| 1 | 2 | 3 |\n| 4 | 5 |",
    "This text spells <|im_end|> and <|im_start|> and <|endoftext|> and goes on.",
    "lorem ipsum dolor sit amet " * 12,
]

PROMPTS = [*CONVERSATIONS, *CODE, *SCRIPTS, *EMOJI, *ODD]
assert len(PROMPTS) >= 50


def build_long_text(num_paragraphs: int, topic: int = 0) -> str:
    """A long text that does not repeat itself exactly: about 60 tokens a paragraph."""
    people = ["Ines", "Tomas", "Mirela", "Okafor", "Yuki", "Devi", "Lars"]
    places = ["the harbour", "a market hall", "the old library", "platform nine", "a glass house", "the ferry"]
    things = ["a brass compass", "seven letters", "the ledger of 1893", "a basket of pears", "an unfinished map"]
    lines = []
    for i in range(num_paragraphs):
        j = i + 3 * topic
        lines.append(
            f"On day {i + 1}, {people[j % 7]} walked to {places[(j * 5 + 1) % 6]} with {things[(j * 3 + 2) % 5]}. "
            f"It was {(j * 37) % 24:02d}:{(j * 53) % 60:02d} and {j * 7 % 31} degrees; "
            f"{people[(j + 3) % 7]} had been waiting there, and asked for the third time why nobody had told "
            f"{people[(j * 2 + 1) % 7]} about it."
        )
    return "\n".join(lines) + "\nWho asked the question, and where?"
