//! Durations as people write them: `250ms`, `10s`, `5m`, `1h`; and whole numbers.

use std::time::Duration;

/// How to write a duration.
pub(crate) const ADVICE: &str = "write a whole number and its unit, such as 250ms, 10s, 5m or 1h";

/// Reads a duration. An error does not repeat it.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let scale = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(ADVICE.to_owned()),
    };
    let number: u64 = match number {
        "" => return Err(ADVICE.to_owned()),
        number => number.parse().map_err(|_| "the number is too large".to_owned())?,
    };
    // A century is for ever, and far from where arithmetic on clocks ends.
    const LONGEST: u64 = 100 * 366 * 24 * 3_600_000;
    match number.checked_mul(scale) {
        Some(millis) if millis <= LONGEST => Ok(Duration::from_millis(millis)),
        _ => Err("the longest duration is a hundred years".to_owned()),
    }
}

/// Reads a whole number between two others. An error does not repeat it.
pub(crate) fn number(from: u64, to: u64) -> impl Fn(&str) -> Result<u64, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| (from..=to).contains(number));
        number.ok_or_else(|| format!("write a whole number from {from} to {to}"))
    }
}

/// Writes a duration as a person would say it: two digits of what matters.
pub(crate) fn spoken(duration: Duration) -> String {
    let millis = duration.as_millis();
    match millis {
        0..1_000 => format!("{millis}ms"),
        1_000..60_000 => format!("{}.{}s", millis / 1000, millis % 1000 / 100),
        60_000..3_600_000 => format!("{}m{:02}s", millis / 60_000, millis % 60_000 / 1000),
        _ => format!("{}h{:02}m", millis / 3_600_000, millis % 3_600_000 / 60_000),
    }
}

/// In whole milliseconds.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Reads the time between two looks at a store.
pub(crate) fn between_looks(text: &str) -> Result<Duration, String> {
    let range = Duration::from_millis(100)..=Duration::from_secs(3600);
    match parse(text)? {
        time if range.contains(&time) => Ok(time),
        _ => Err("write a time from 100ms to 1h".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_a_number_and_a_unit() {
        for (text, millis) in [("250ms", 250), ("10s", 10_000), ("5m", 300_000), ("1h", 3_600_000), ("0s", 0)] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        let endless = "9".repeat(40) + "s";
        for text in ["", "10", "s", "-1s", "1.5s", "10 s", "1d", "10S", "1s2s", "99999999999999h", &endless, "١s"] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!(between_looks("250ms"), Ok(Duration::from_millis(250)));
        for text in ["0s", "99ms", "2h", "1", ""] {
            assert!(between_looks(text).is_err(), "{text}");
        }
        assert_eq!(number(1, 256)("256"), Ok(256));
        for text in ["0", "257", "-1", "x", ""] {
            assert!(number(1, 256)(text).expect_err(text).contains("from 1 to 256"), "{text}");
        }
    }

    #[test]
    fn durations_are_spoken_briefly() {
        for (millis, text) in [(0, "0ms"), (250, "250ms"), (29_340, "29.3s"), (65_000, "1m05s"), (7_320_000, "2h02m")] {
            assert_eq!(spoken(Duration::from_millis(millis)), text);
        }
    }
}
