"""What is on an HTML page."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """What is on a page: texts, the rows of tables and of the module tree, elements; and that all are closed."""

    VOID = frozenset({"meta", "br", "line", "path", "circle"})

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.elements, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        if tag in ("tr", "h2") or "row" in attributes.get("class", "").split():
            self.rows.append([])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style") and data.strip():
            self.texts.append(data)
            if self.rows:
                self.rows[-1].append(data.strip())

    def row(self, name):
        (found,) = [row for row in self.rows if row[:1] == [name]]
        return found[1:]

    def loaded(self):
        """What the page would load from elsewhere."""
        return [each[name] for _, each in self.elements for name in ("src", "href") if name in each]
