//! `// @unroll`: loops with constant bounds become blocks.

use super::eval::{Consts, Int, IntType, common_type};
use super::line::{Directive, Line, Origin, is_word, tokens};
use crate::Result;

/// How many bytes of loop bodies may be copied for one module; a body inside two unrolled loops counts for each. As
/// every level of nesting copies what is inside, this bounds the recursion too.
const MAX_COPIED_BYTES: usize = 4 << 20;

/// What a repetition counts for at least: an empty body isn't free.
const MIN_COPY_BYTES: usize = 64;

pub(super) fn unroll(lines: &[Line]) -> Result<Vec<Line>> {
    let mut unroller = Unroller { consts: Consts::of(lines), copied_bytes: 0, lines: Vec::new() };
    unroller.expand(lines)?;
    Ok(unroller.lines)
}

struct Unroller {
    consts: Consts,
    copied_bytes: usize,
    lines: Vec<Line>,
}

impl Unroller {
    fn expand(&mut self, lines: &[Line]) -> Result<()> {
        let mut rest = lines;
        while let [line, after @ ..] = rest {
            rest = after;
            if line.directive == Some(Directive::Unroll) {
                rest = self.expand_loop(line.origin, after)?;
            } else {
                self.lines.push(line.clone());
            }
        }
        Ok(())
    }

    /// Unrolls the loop that begins with the first line, and gives back the lines after the one on which it ends.
    ///
    /// The counter is replaced from the outermost loop inwards: where an inner loop is read, the outer counters are
    /// literals already.
    fn expand_loop<'a>(&mut self, directive: Origin, lines: &'a [Line]) -> Result<&'a [Line]> {
        let header = lines.first().ok_or_else(|| directive.error("`// @unroll` has to stand before a `for`"))?;
        let for_loop = ForLoop::parse(&header.code, &self.consts).map_err(|message| header.origin.error(message))?;
        let end = closing_brace(lines, for_loop.open_brace);
        let (last, close_brace) = end.ok_or_else(|| header.origin.error("the loop's `{` is never closed"))?;
        let tail = lines[last].part(close_brace + 1..lines[last].text.len());
        let mut body = lines[..=last].to_vec();
        body[last] = lines[last].part(0..close_brace);
        body[0] = body[0].part(for_loop.open_brace + 1..body[0].text.len());
        check_body(&body, for_loop.counter)?;

        let body_bytes: usize = body.iter().map(|line| line.text.len()).sum();
        let indent = &header.text[..header.code.len() - header.code.trim_start().len()];
        let mut value = for_loop.start.value();
        let mut any = false;
        while value < for_loop.end {
            self.copied_bytes += body_bytes.max(MIN_COPY_BYTES);
            if self.copied_bytes > MAX_COPIED_BYTES {
                let message = format!("unrolling copies more than {MAX_COPIED_BYTES} bytes, the most that is accepted");
                return Err(directive.error(message));
            }
            let literal = Int::new(value, for_loop.start.int_type()).map_err(|message| header.origin.error(message))?;
            if let (Some(previous), true) = (self.lines.last_mut(), any) {
                previous.end_line();
            }
            self.lines.push(Line::generated(header.origin, &format!("{indent}{{")));
            self.expand(&substituted(&body, for_loop.counter, &literal.literal()))?;
            self.lines.push(Line::generated(lines[last].origin, "}"));
            value += for_loop.step;
            any = true;
        }
        if any || !tail.text.trim().is_empty() {
            self.lines.push(tail);
        }
        Ok(&lines[last + 1..])
    }
}

struct ForLoop<'a> {
    counter: &'a str,
    /// The counter's first value, with its type.
    start: Int,
    /// The counter stays below this.
    end: i64,
    step: i64,
    /// Where in the line the body's brace stands.
    open_brace: usize,
}

impl<'a> ForLoop<'a> {
    fn parse(code: &'a str, consts: &Consts) -> Result<Self, String> {
        const FORM: &str = "`// @unroll` needs the next line to be `for (var i = START; i < BOUND; i += STEP) {`";
        let open_brace = code.find('{').ok_or(FORM)?;
        let header = code[..open_brace].trim().strip_prefix("for").map(str::trim);
        let header = header.and_then(|header| header.strip_prefix('(')?.strip_suffix(')')).ok_or(FORM)?;
        let parts: Vec<&str> = header.split(';').map(str::trim).collect();
        let [init, condition, update] = parts[..] else { return Err(FORM.to_owned()) };

        let (declared, start) = init.strip_prefix("var ").and_then(|init| init.split_once('=')).ok_or(FORM)?;
        let (counter, declared_type) = match declared.split_once(':') {
            Some((counter, type_name)) => (counter.trim(), IntType::parse(type_name.trim())?),
            None => (declared.trim(), IntType::Untyped),
        };
        if !is_word(counter) {
            return Err(FORM.to_owned());
        }
        let after_counter = |text: &'a str, operator: &str| {
            text.strip_prefix(counter)?.trim_start().strip_prefix(operator).map(str::trim_start)
        };
        let (bound, inclusive) = match (after_counter(condition, "<="), after_counter(condition, "<")) {
            (Some(bound), _) => (bound, true),
            (None, Some(bound)) => (bound, false),
            (None, None) => return Err(format!("`{condition}`, accepted: `{counter} < BOUND`, `{counter} <= BOUND`")),
        };
        let assigned = after_counter(update, "=").and_then(|sum| after_counter(sum, "+"));
        let step = match (after_counter(update, "++"), after_counter(update, "+=").or(assigned)) {
            (Some(""), _) => "1",
            (_, Some(step)) => step,
            _ => {
                return Err(format!(
                    "`{update}`, accepted: `{counter}++`, `{counter} += STEP`, `{counter} = {counter} + STEP`"
                ));
            }
        };

        let (start, bound, step_value) = (consts.eval(start)?, consts.eval(bound)?, consts.eval(step)?);
        // As in WGSL, the first value decides on the counter's type, and a literal without suffix makes it an i32.
        let int_type = match common_type(declared_type, start.int_type())? {
            IntType::Untyped => IntType::I32,
            typed => typed,
        };
        let (start, bound, step_value) =
            (start.converted(int_type)?, bound.converted(int_type)?, step_value.converted(int_type)?);
        if step_value.value() <= 0 {
            return Err(format!("step = {}, accepted: at least 1", step_value.value()));
        }
        Ok(Self { counter, start, end: bound.value() + i64::from(inclusive), step: step_value.value(), open_brace })
    }
}

/// The index of the line, and the place in it, of the brace that closes the one at `open` in the first line.
fn closing_brace(lines: &[Line], open: usize) -> Option<(usize, usize)> {
    let mut depth = 0_usize;
    for (index, line) in lines.iter().enumerate() {
        for (at, char) in line.code.char_indices().skip_while(|(at, _)| index == 0 && *at < open) {
            match char {
                '{' => depth += 1,
                '}' if depth == 1 => return Some((index, at)),
                '}' => depth -= 1,
                _ => {}
            }
        }
    }
    None
}

/// Refuses what would mean something else in a repeated body.
fn check_body(body: &[Line], counter: &str) -> Result<()> {
    let code: String = body.iter().map(|line| line.code.as_str()).collect();
    let mut braces = Vec::new(); // of the statements around, by keyword
    let mut keyword = "";
    let mut previous = "";
    for (at, token) in tokens(&code) {
        let problem = match token {
            "for" | "while" | "loop" | "switch" => {
                keyword = token;
                None
            }
            "{" => {
                braces.push(core::mem::take(&mut keyword));
                None
            }
            "}" => {
                braces.pop();
                None
            }
            "break" if braces.iter().all(|keyword| keyword.is_empty()) => Some("`break` leaves".to_owned()),
            "continue" if braces.iter().all(|keyword| matches!(*keyword, "" | "switch")) => {
                Some("`continue` cuts short".to_owned())
            }
            _ if token != counter || previous == "." => None,
            _ if matches!(previous, "var" | "let" | "const") => {
                Some(format!("`{previous} {counter}` hides the counter of"))
            }
            _ if is_assignment(code[at + token.len()..].trim_start()) => Some(format!("`{counter}` is assigned to in")),
            _ => None,
        };
        if let Some(problem) = problem {
            let mut end = 0;
            let line = body.iter().find(|line| {
                end += line.code.len();
                at < end
            });
            return Err(line.unwrap_or(&body[0]).origin.error(format!("{problem} an unrolled loop")));
        }
        previous = token;
    }
    Ok(())
}

/// Whether what follows a name assigns to it.
fn is_assignment(rest: &str) -> bool {
    const OPERATORS: [&str; 12] = ["++", "--", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="];
    (rest.starts_with('=') && !rest.starts_with("==")) || OPERATORS.iter().any(|operator| rest.starts_with(operator))
}

/// The lines with a literal for each use of the counter.
fn substituted(lines: &[Line], counter: &str, literal: &str) -> Vec<Line> {
    let mut lines = lines.to_vec();
    let mut member = false;
    for line in &mut lines {
        let mut hits = Vec::new();
        for (at, token) in tokens(&line.code) {
            if token == counter && !member {
                hits.push(at..at + token.len());
            }
            member = token == ".";
        }
        for hit in hits.into_iter().rev() {
            line.replace(hit, literal);
        }
    }
    lines
}
