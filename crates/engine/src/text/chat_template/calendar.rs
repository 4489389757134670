//! Python's `strftime` for the directives that chat templates use, in UTC.
//!
//! It does not read a clock.

use std::time::{SystemTime, UNIX_EPOCH};

const WEEKDAYS: [&str; 7] = [
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A point in time, taken apart.
struct CalendarTime {
    year: u64,
    /// From 0.
    month: usize,
    /// From 1.
    day: u64,
    /// From 1.
    day_of_year: u64,
    /// From Sunday.
    weekday: usize,
    hour: u64,
    minute: u64,
    second: u64,
}

impl CalendarTime {
    /// Times before 1970 count as 1970.
    fn at(time: SystemTime) -> Self {
        let seconds = time
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let num_days = seconds / 86_400;
        let (year, day_of_year) = year_and_day(num_days);
        let (month, day) = month_and_day(year, day_of_year);
        CalendarTime {
            year,
            month,
            day: day + 1,
            day_of_year: day_of_year + 1,
            // The first of January 1970 was a Thursday.
            weekday: ((num_days + 4) % 7) as usize,
            hour: seconds / 3_600 % 24,
            minute: seconds / 60 % 60,
            second: seconds % 60,
        }
    }

    fn hour_of_12(&self) -> u64 {
        match self.hour % 12 {
            0 => 12,
            hour => hour,
        }
    }
}

/// Writes `time` as `format` says. Unknown directives stay as they are.
pub(crate) fn strftime(time: SystemTime, format: &str) -> String {
    let time = CalendarTime::at(time);
    let mut written = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            written.push(character);
            continue;
        }
        match characters.next() {
            Some('-') => match characters.next() {
                Some(directive) => written.push_str(unpadded(&write(&time, directive))),
                None => written.push_str("%-"),
            },
            Some(directive) => written.push_str(&write(&time, directive)),
            None => written.push('%'),
        }
    }
    written
}

fn write(time: &CalendarTime, directive: char) -> String {
    let weekday = WEEKDAYS[time.weekday];
    let month = MONTHS[time.month];
    match directive {
        'Y' => time.year.to_string(),
        'y' => format!("{:02}", time.year % 100),
        'm' => format!("{:02}", time.month + 1),
        'B' => month.to_owned(),
        'b' | 'h' => month[..3].to_owned(),
        'd' => format!("{:02}", time.day),
        'e' => format!("{:2}", time.day),
        'j' => format!("{:03}", time.day_of_year),
        'A' => weekday.to_owned(),
        'a' => weekday[..3].to_owned(),
        'w' => time.weekday.to_string(),
        'H' => format!("{:02}", time.hour),
        'I' => format!("{:02}", time.hour_of_12()),
        'M' => format!("{:02}", time.minute),
        'S' => format!("{:02}", time.second),
        'f' => "000000".to_owned(),
        'p' => if time.hour < 12 { "AM" } else { "PM" }.to_owned(),
        'Z' => "UTC".to_owned(),
        'z' => "+0000".to_owned(),
        'F' => strftime_parts(time, &['Y', 'm', 'd'], "-"),
        'T' => strftime_parts(time, &['H', 'M', 'S'], ":"),
        'R' => strftime_parts(time, &['H', 'M'], ":"),
        'D' => strftime_parts(time, &['m', 'd', 'y'], "/"),
        'n' => "\n".to_owned(),
        't' => "\t".to_owned(),
        '%' => "%".to_owned(),
        other => format!("%{other}"),
    }
}

fn strftime_parts(time: &CalendarTime, directives: &[char], separator: &str) -> String {
    let parts: Vec<String> = directives
        .iter()
        .map(|&directive| write(time, directive))
        .collect();
    parts.join(separator)
}

fn unpadded(text: &str) -> &str {
    let unpadded = text.trim_start_matches(['0', ' ']);
    match unpadded {
        "" => "0",
        _ => unpadded,
    }
}

/// Year, and day in it from 0.
fn year_and_day(mut num_days: u64) -> (u64, u64) {
    // The Gregorian calendar repeats every 400 years.
    const DAYS_OF_400_YEARS: u64 = 146_097;
    let mut year = 1970 + num_days / DAYS_OF_400_YEARS * 400;
    num_days %= DAYS_OF_400_YEARS;
    while num_days >= days_of_year(year) {
        num_days -= days_of_year(year);
        year += 1;
    }
    (year, num_days)
}

/// Month and day in it, both from 0.
fn month_and_day(year: u64, mut day_of_year: u64) -> (usize, u64) {
    let february = days_of_year(year) - 337;
    let days = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while day_of_year >= days[month] {
        day_of_year -= days[month];
        month += 1;
    }
    (month, day_of_year)
}

fn days_of_year(year: u64) -> u64 {
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    if is_leap { 366 } else { 365 }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn writes_as_python_does() {
        let cases = [
            (1_736_944_496, "%d %b %Y", "15 Jan 2025"),
            (
                1_736_944_496,
                "%A, %B %-d, %Y %H:%M:%S",
                "Wednesday, January 15, 2025 12:34:56",
            ),
            (
                1_736_944_496,
                "%F %T %I%p %j %y %%%Q%",
                "2025-01-15 12:34:56 12PM 015 25 %%Q%",
            ),
            (951_782_400, "%Y-%m-%d %a %j", "2000-02-29 Tue 060"),
            (0, "%e %-I %D", " 1 12 01/01/70"),
            (4_107_542_399, "%F", "2100-02-28"),
            (4_107_542_400, "%F", "2100-03-01"),
        ];
        for (seconds, format, expected) in cases {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(strftime(time, format), expected);
        }
    }
}
