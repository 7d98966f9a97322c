//! Results as JUnit XML, in the form that build servers read.

use std::fmt::Write;

use lockkit_testkit::{Checked, Verdict};

use super::report::Report;

/// The whole file. What a store said is in there as text, whatever it is.
pub(super) fn xml(report: &Report) -> String {
    let counts = format!(
        r#"tests="{}" failures="{}" errors="0" skipped="{}" time="{:.3}""#,
        report.cases.len(),
        report.failed(),
        report.ignored(),
        report.took.as_secs_f64(),
    );
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    // Writing to a String does not fail.
    let _ = writeln!(out, "<testsuites name=\"lockkit check\" {counts}>");
    let _ = writeln!(out, "  <testsuite name=\"{}\" {counts}>", escaped(&report.store));
    report.cases.iter().for_each(|checked| out.push_str(&test_case(checked)));
    out + "  </testsuite>\n</testsuites>\n"
}

fn test_case(checked: &Checked) -> String {
    let (group, name) = checked.case.name.split_once("::").unwrap_or(("", checked.case.name));
    let seconds = checked.took.as_secs_f64();
    let open = format!(r#"    <testcase classname="{}" name="{}" time="{seconds:.3}""#, escaped(group), escaped(name));
    match &checked.verdict {
        Verdict::Passed => format!("{open}/>\n"),
        Verdict::Failed(seen) => {
            let (doc, seen) = (escaped(checked.case.doc), escaped(seen));
            format!("{open}>\n      <failure message=\"{doc}\">{seen}</failure>\n    </testcase>\n")
        }
        Verdict::Ignored(why) => {
            format!("{open}>\n      <skipped message=\"{}\"/>\n    </testcase>\n", escaped(why))
        }
    }
}

/// Text as it may stand in an element or between double quotes. Characters that XML 1.0 has no way to write are replaced.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\t' | '\n' | '\r' => {
                let _ = write!(out, "&#{};", u32::from(c));
            }
            '\0'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => out.push(char::REPLACEMENT_CHARACTER),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        process::{Command, Stdio},
        time::Duration,
    };

    use lockkit_testkit::cases;

    use super::*;

    #[test]
    fn whatever_a_store_says_can_be_read_back() {
        let odd = "a <b> & \"c\" 'd' ]]> \0\u{1b}[31m\r\n\té🔒\u{ffff}";
        let verdicts = [Verdict::Passed, Verdict::Failed(odd.into()), Verdict::Ignored(odd.into())];
        let took = Duration::from_millis(1234);
        let all = cases::all().into_iter().zip(verdicts);
        let cases = all.map(|(case, verdict)| Checked { case, verdict, took }).collect();
        let xml = xml(&Report { store: odd.into(), cases, took, left: Vec::new() });
        // Another's parser, which takes nothing that is not well-formed.
        let script = "import sys, xml.etree.ElementTree as e\n\
            s = e.fromstring(sys.stdin.buffer.read())\n\
            c = s.find('testsuite').findall('testcase')\n\
            assert [s.get(k) for k in ('tests', 'failures', 'skipped', 'time')] == ['3', '1', '1', '1.234'], s.attrib\n\
            assert c[0].get('classname') == 'lifecycle' and len(c[0]) == 0\n\
            assert all('::' not in case.get('name') and case.get('time') == '1.234' for case in c)\n\
            odd = 'a <b> & \"c\" \\'d\\' ]]> \\ufffd\\ufffd[31m\\r\\n\\té🔒\\ufffd'\n\
            assert c[1].find('failure').text == odd, ascii(c[1].find('failure').text)\n\
            assert c[2].find('skipped').get('message') == s.find('testsuite').get('name') == odd\n";
        let mut python = Command::new("python3");
        let mut python = python.args(["-c", script]).stdin(Stdio::piped()).spawn().expect("python3 is there");
        python.stdin.take().expect("a pipe").write_all(xml.as_bytes()).expect("it reads");
        assert!(python.wait().expect("it ends").success(), "{xml}");
    }
}
