//! Who held a lock when, for programs and in words. No I/O.

use serde_json::{Value, json};

use crate::{
    stats::grouped,
    timeline::{Ending, Fault, Timeline},
};

impl Timeline {
    pub(super) fn json(&self) -> Value {
        let beliefs = self.beliefs.iter().map(|belief| {
            let (end, told, reason) = match &belief.end {
                Ending::Released => ("released", None, None),
                Ending::Lost { told, reason } => ("lost", Some(*told), Some(reason)),
                Ending::Open => ("open", None, None),
            };
            json!({
                "process": belief.process, "from": belief.from, "until": belief.until, "fence": belief.fence,
                "end": end, "told": told, "reason": reason,
            })
        });
        let overlaps = self
            .overlaps
            .iter()
            .map(|overlap| json!({ "from": overlap.from, "until": overlap.until, "processes": overlap.processes }));
        let refused = self
            .refused
            .iter()
            .map(|refusal| json!({ "process": refusal.process, "at": refusal.at, "fence": refusal.fence }));
        json!({
            "fault": self.fault.name(), "store": self.store, "processes": self.processes, "victim": self.victim,
            "span": [self.span.0, self.span.1], "over": self.over, "taken": self.taken, "forgets": self.forgets,
            "beliefs": beliefs.collect::<Vec<_>>(), "overlaps": overlaps.collect::<Vec<_>>(),
            "written": self.written, "refused": refused.collect::<Vec<_>>(),
        })
    }

    /// What it shows, in a few sentences.
    pub(super) fn sentences(&self) -> String {
        let mut says = match self.taken {
            Some(seconds) => format!("Another had the lock after {} s.", grouped(seconds)),
            None => "The holder kept its lock.".to_owned(),
        };
        says += &match self.overlaps.len() {
            0 => " No two believed to hold it at once.".to_owned(),
            times => format!(
                " {times} {} two believed to hold it at once, for {} ms at the longest.",
                if times == 1 { "time" } else { "times" },
                grouped(self.longest_overlap())
            ),
        };
        if self.forgets {
            says += " This server keeps its locks in memory, and has none of them when it is back.";
        }
        says += &match self.refused.len() {
            // A process that was killed writes no more.
            0 if self.fault == Fault::Killed => String::new(),
            0 => " No write came late.".to_owned(),
            1 => " 1 late write, refused by its fence.".to_owned(),
            some => format!(" {some} late writes, refused by their fences."),
        };
        says
    }
}

impl Ending {
    /// How it ended, in a word or two.
    pub(super) fn text(&self) -> String {
        match self {
            Self::Released => "released".to_owned(),
            Self::Lost { reason, .. } => format!("lost: {reason}"),
            Self::Open => "not heard of any more".to_owned(),
        }
    }
}
