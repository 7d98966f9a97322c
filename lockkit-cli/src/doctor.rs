//! `lockkit doctor`: whether a store is fit for locks.

use clap::Args as ClapArgs;
use lockkit::{Finding, Severity};
use serde_json::{Value, json};

use crate::{
    exit::{Exit, UNFIT},
    show::{fit, plain, print, print_json, table},
    store::{StoreArgs, block_on},
};

/// Find out whether a store is fit for locks, and what puts them at risk
///
/// Looks at the server's role, version and settings, at what survives a crash, at the table or the nodes of the locks, at
/// permissions and clocks. Changes nothing: tests permissions under names that no lock can have. Reports what this user may
/// not ask.
///
/// Exit status: 0 if nothing is worse than a note, 78 if there are warnings or errors, 69 if the store can't be asked.
///
/// With --json: an object with worst (ok, note, warning or error) and findings: an array of objects, the worst first,
/// with severity, code (lasting, for scripts), server (null for the store as a whole), finding, and advice (empty if there
/// is nothing to do).
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Exit {
    let url = args.store.url()?;
    let findings = block_on(async { Ok(lockkit::diagnose(url).await?) })?;
    let worst = findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok);
    if args.json {
        let all: Vec<_> = findings.iter().map(to_json).collect();
        print_json(&json!({ "worst": worst.to_string(), "findings": all }))?;
    } else {
        show(&findings)?;
    }
    Ok(if worst > Severity::Note { UNFIT } else { 0 })
}

fn to_json(finding: &Finding) -> Value {
    json!({
        "severity": finding.severity.to_string(),
        "code": finding.code,
        "server": finding.server.as_deref(),
        "finding": finding.summary,
        "advice": finding.advice,
    })
}

/// A table, as wide as the terminal; one line each for whoever reads it by another program.
fn show(findings: &[Finding]) -> Result<(), crate::exit::Failure> {
    let has_servers = findings.iter().any(|finding| finding.server.is_some());
    let header = ["SEVERITY", "SERVER", "FINDING", "WHAT TO DO"];
    let select = |cells: [String; 4]| -> Vec<String> {
        let keep = |(column, _): &(usize, String)| has_servers || *column != 1;
        cells.into_iter().enumerate().filter(keep).map(|(_, cell)| cell).collect()
    };
    let header = select(header.map(str::to_owned));
    let mut rows = table(&header.iter().map(String::as_str).collect::<Vec<_>>());
    fit(&mut rows);
    for finding in findings {
        let server = finding.server.as_deref().unwrap_or("-");
        let cells = [finding.severity.to_string(), plain(server), plain(&finding.summary), plain(&finding.advice)];
        rows.add_row(select(cells));
    }
    print(|out| writeln!(out, "{}", rows.trim_fmt()))
}
