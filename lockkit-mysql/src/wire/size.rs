//! How many rows one statement takes.

/// How many rows a statement with a list of names takes. The driver and the server keep each statement prepared, so
/// that there must be few of them; a list is filled up by repeating its last name.
const SIZES: [usize; 4] = [1, 8, 64, 512];

/// One of these.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size(pub(super) usize);

impl Size {
    /// The most rows of one statement.
    pub(crate) const MOST: usize = SIZES[SIZES.len() - 1];

    /// The smallest that takes so many rows.
    pub(crate) fn of(rows: usize) -> Self {
        Self(SIZES.into_iter().find(|size| rows <= *size).unwrap_or(Self::MOST))
    }

    /// As many as the statement takes: these, and the last one again and again.
    pub(crate) fn fill<T>(self, items: &[T]) -> impl Iterator<Item = &T> {
        items.iter().chain(std::iter::repeat_with(|| items.last()).flatten()).take(self.0)
    }

    /// An item for each row, as SQL lists them.
    pub(crate) fn list(self, item: &str) -> String {
        vec![item; self.0].join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_filled_up() {
        let filled: Vec<_> = Size::of(3).fill(&[1, 2, 3]).copied().collect();
        assert_eq!(filled, [1, 2, 3, 3, 3, 3, 3, 3]);
        assert_eq!(Size::of(1).fill(&[7]).count(), 1);
        assert_eq!(Size::of(512).fill(&[0; 512]).count(), 512);
    }
}
