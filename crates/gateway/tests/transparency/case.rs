//! One case: what the client does, and what the service behind answers.

/// What the client does, step by step.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    Send(Vec<u8>),
    /// Long enough for the peer to have read what was sent before.
    Pause,
    /// Ends the sending side.
    HalfClose,
    /// Reads interim answers until this status has come.
    Interim(u16),
    /// Reads interim answers and the final one, of a request of this method.
    Answer(String),
    /// Waits for these bytes of an answer that goes on (none: for nothing), and lets the service behind go on.
    Piece(&'static str),
    /// Reads so many bytes of a tunnel.
    Tunnel(usize),
    /// Reads a tunnel to its end.
    TunnelEnd,
}

/// What the service behind does after it has read a request head.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Reads the request body.
    Body,
    Write(Vec<u8>),
    /// Waits for the client to have got the piece before.
    Await,
    /// Sends back so many bytes of a tunnel.
    Echo(usize),
    /// Closes the connection.
    Close,
}

/// One case of the corpus.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) acts: Vec<Act>,
    pub(crate) steps: Vec<Step>,
}

/// A request in the making.
#[derive(Clone, Debug)]
pub(crate) struct Req {
    method: String,
    target: String,
    version: &'static str,
    host: bool,
    lines: Vec<u8>,
    body: Vec<u8>,
}

impl Req {
    pub(crate) fn new(method: &str, target: &str) -> Self {
        let (method, target) = (method.to_owned(), target.to_owned());
        Self { method, target, version: "HTTP/1.1", host: true, lines: Vec::new(), body: Vec::new() }
    }

    pub(crate) fn get(target: &str) -> Self {
        Self::new("GET", target)
    }

    /// A header line as it is, without its end.
    pub(crate) fn line(mut self, line: impl AsRef<[u8]>) -> Self {
        self.lines.extend_from_slice(line.as_ref());
        self.lines.extend_from_slice(b"\r\n");
        self
    }

    pub(crate) fn lines(self, lines: &[&str]) -> Self {
        lines.iter().fold(self, |request, line| request.line(line))
    }

    pub(crate) fn without_host(mut self) -> Self {
        self.host = false;
        self
    }

    pub(crate) fn version(mut self, version: &'static str) -> Self {
        self.version = version;
        self
    }

    /// A body with its length.
    pub(crate) fn body(self, body: impl AsRef<[u8]>) -> Self {
        let len = body.as_ref().len();
        self.line(format!("Content-Length: {len}")).raw_body(body)
    }

    /// A body in these chunks, as it is on the wire.
    pub(crate) fn chunked(self, chunks: &str) -> Self {
        self.line("Transfer-Encoding: chunked").raw_body(chunks)
    }

    pub(crate) fn raw_body(mut self, body: impl AsRef<[u8]>) -> Self {
        self.body = body.as_ref().to_vec();
        self
    }

    pub(crate) fn head(&self) -> Vec<u8> {
        let host = if self.host { "Host: corpus.test\r\n" } else { "" };
        let mut bytes = format!("{} {} {}\r\n{host}", self.method, self.target, self.version).into_bytes();
        bytes.extend_from_slice(&self.lines);
        bytes.extend_from_slice(b"\r\n");
        bytes
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        [self.head(), self.body.clone()].concat()
    }

    pub(crate) fn body_bytes(&self) -> Vec<u8> {
        self.body.clone()
    }

    /// Sends it and reads one answer; the service behind answers as usual.
    pub(crate) fn case(&self, name: impl Into<String>) -> Case {
        let acts = vec![Act::Send(self.bytes()), Act::Answer(self.method.clone())];
        Case { name: name.into(), acts, steps: answered(&Rep::ok()) }
    }
}

/// A reply in the making. It has a date, so that only those without one show who adds it.
#[derive(Clone, Debug)]
pub(crate) struct Rep {
    start: Vec<u8>,
    lines: Vec<u8>,
    body: Vec<u8>,
}

impl Rep {
    /// The status line after the version, and a date.
    pub(crate) fn new(status: impl AsRef<[u8]>) -> Self {
        Self::bare([b"HTTP/1.1 ", status.as_ref()].concat()).line("Date: Tue, 01 Dec 2026 00:00:00 GMT")
    }

    /// The whole start line, and no date.
    pub(crate) fn bare(start: impl AsRef<[u8]>) -> Self {
        Self { start: start.as_ref().to_vec(), lines: Vec::new(), body: Vec::new() }
    }

    pub(crate) fn ok() -> Self {
        Self::new("200 OK").body("ok")
    }

    pub(crate) fn line(mut self, line: impl AsRef<[u8]>) -> Self {
        self.lines.extend_from_slice(line.as_ref());
        self.lines.extend_from_slice(b"\r\n");
        self
    }

    pub(crate) fn lines(self, lines: &[&str]) -> Self {
        lines.iter().fold(self, |reply, line| reply.line(line))
    }

    pub(crate) fn body(self, body: impl AsRef<[u8]>) -> Self {
        let len = body.as_ref().len();
        self.line(format!("Content-Length: {len}")).raw_body(body)
    }

    pub(crate) fn chunked(self, chunks: impl AsRef<[u8]>) -> Self {
        self.line("Transfer-Encoding: chunked").raw_body(chunks)
    }

    pub(crate) fn raw_body(mut self, body: impl AsRef<[u8]>) -> Self {
        self.body = body.as_ref().to_vec();
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        [&self.start[..], b"\r\n", &self.lines, b"\r\n", &self.body].concat()
    }

    /// The answer to a GET.
    pub(crate) fn case(&self, name: impl Into<String>) -> Case {
        Req::get("/").case(name).answered(self)
    }
}

fn answered(reply: &Rep) -> Vec<Step> {
    vec![Step::Body, Step::Write(reply.bytes())]
}

impl Case {
    /// The service behind reads the whole request and answers so.
    pub(crate) fn answered(mut self, reply: &Rep) -> Self {
        self.steps = answered(reply);
        self
    }

    pub(crate) fn acts(mut self, acts: Vec<Act>) -> Self {
        self.acts = acts;
        self
    }

    pub(crate) fn steps(mut self, steps: Vec<Step>) -> Self {
        self.steps = steps;
        self
    }

    /// Whether the client ends its side while it waits for an answer.
    pub(crate) fn ends_early(&self) -> bool {
        self.acts.iter().any(|act| matches!(act, Act::HalfClose))
    }

    /// The service behind closes after its answer.
    pub(crate) fn closed(mut self) -> Self {
        self.steps.push(Step::Close);
        self
    }
}
