"""The server: scheduler, cache manager, runner and engine; the OpenAI API over them; the page; metrics."""
