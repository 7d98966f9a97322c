//! The comparison for programs. No I/O.

use serde_json::{Map, Value, json};

use crate::timeline::Timeline;

use super::{
    Changes, Interrupted, Report,
    curves::Curve,
    rows::{Better, Cell, Row},
};

impl Report {
    /// The version of the JSON's schema. It grows when something is renamed, removed, or means something else; what is new can be
    /// ignored. `docs/comparison.md` describes it.
    pub const SCHEMA: u32 = 2;

    /// The file for programs: an object in JSON, of several lines.
    #[must_use]
    pub fn as_json(&self) -> String {
        format!("{:#}", self.json())
    }

    fn json(&self) -> Value {
        let setting = &self.setting;
        json!({
            "schema": Self::SCHEMA,
            "lockkit": setting.version,
            "at": setting.at,
            "build": setting.build(),
            "quick": setting.is_quick(),
            "groups": setting.groups.iter().map(|group| group.name()).collect::<Vec<_>>(),
            "impossible": setting.impossible,
            "processors": setting.processors,
            "system": setting.system,
            "seconds": setting.took.as_secs(),
            "interrupted": setting.interrupted.as_ref().map(interruption_as_json),
            "stores": self.stores,
            "peers": self.peers().collect::<Vec<_>>(),
            "rows": self.rows.iter().map(|row| self.row_as_json(row)).collect::<Vec<_>>(),
            "curves": self.curves.iter().map(|curve| self.curve_as_json(curve)).collect::<Vec<_>>(),
            "timelines": self.timelines.iter().map(Timeline::json).collect::<Vec<_>>(),
            "failures": self.failures,
            "not_compared": self.missing,
            "changes": self.changes.as_ref().map(changes_as_json),
        })
    }

    fn row_as_json(&self, row: &Row) -> Value {
        let (mut values, mut ranges, mut absent) = (Map::new(), Map::new(), Map::new());
        for (store, cell) in self.stores.iter().zip(&row.cells) {
            let value = match cell {
                Cell::Number(figure) => {
                    if let Some((least, most)) = figure.range {
                        ranges.insert(store.clone(), json!([least, most]));
                    }
                    json!(figure.value)
                }
                Cell::Text(text) => json!(text),
                Cell::Absent(why) => {
                    absent.insert(store.clone(), why.as_ref().map_or(Value::Null, |why| why.text().into()));
                    Value::Null
                }
            };
            values.insert(store.clone(), value);
        }
        let better = match row.better {
            Better::Higher => Some("higher"),
            Better::Lower => Some("lower"),
            Better::Neither => None,
        };
        let (id, group, title) = (row.id, &row.group, row.title.trim());
        json!({
            "id": id, "group": group, "title": title, "unit": row.unit, "better": better,
            "values": values, "ranges": ranges, "absent": absent,
        })
    }

    fn curve_as_json(&self, curve: &Curve) -> Value {
        let measured = self.stores.iter().zip(&curve.lines).filter(|(_, line)| !line.is_empty());
        let lines: Map<_, _> = measured.map(|(store, line)| (store.clone(), json!(line))).collect();
        json!({ "id": curve.id, "title": curve.title, "x": curve.x, "y": curve.y.title(), "lines": lines })
    }
}

fn interruption_as_json(Interrupted { taken, of, missing, fewer_rounds }: &Interrupted) -> Value {
    json!({ "taken": taken, "of": of, "missing": missing, "fewer_rounds": fewer_rounds })
}

fn changes_as_json(changes: &Changes) -> Value {
    let figures = changes.figures.iter().map(|change| {
        let verdict = if change.worse { "worse" } else { "better" };
        json!({ "id": change.id, "store": change.store, "before": change.before, "now": change.now, "verdict": verdict })
    });
    json!({
        "since": changes.since, "figures": figures.collect::<Vec<_>>(), "within_noise": changes.within_noise, "notes": changes.notes,
    })
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, time::Duration};

    use super::*;
    use crate::{
        plan::{Options, Plan},
        results::Results,
    };

    /// All members of objects in it but those that are named after a store.
    fn members(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Array(values) => values.iter().for_each(|value| members(value, found)),
            Value::Object(object) => {
                for (name, value) in object.iter().filter(|(name, _)| *name != "a store") {
                    found.insert(name.clone());
                    members(value, found);
                }
            }
            _ => {}
        }
    }

    #[test]
    fn the_docs_name_each_member_but_those_of_timelines_and_changes() {
        let plan = Plan::new(Options::default());
        let mut report =
            Report::new(vec![("a store".into(), Results::default())], &plan, Vec::new(), Duration::from_secs(1));
        report.setting.interrupted = Some(Interrupted::default());
        let mut found = BTreeSet::new();
        members(&report.json(), &mut found);
        let docs = include_str!("../../../docs/comparison.md");
        let (_, described) = docs.split_once("## comparison.json").expect("its chapter");
        let (described, _) = described.split_once("## ").expect("the next one");
        let named: BTreeSet<&str> = described.split('`').skip(1).step_by(2).collect();
        let is_named = |member: &str| named.iter().any(|name| name.rsplit('.').next() == Some(member));
        let missing: Vec<_> = found.iter().filter(|member| !is_named(member)).collect();
        assert!(found.len() > 25 && missing.is_empty(), "{missing:?} of {}", found.len());
    }
}
