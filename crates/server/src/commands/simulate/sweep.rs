//! Sweeps: the same command line again for each value of a flag.

use std::ffi::OsString;
use std::str::FromStr;

use anyhow::Context;
use clap::Parser;

use crate::cli::{Cli, Command, SimulateArgs};

/// Runs of one command, at most.
const MAX_RUNS: usize = 1_000;

/// A flag and the values it takes in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sweep {
    flag: String,
    values: Vec<String>,
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (flag, values) = text
            .split_once('=')
            .ok_or_else(|| format!("{text:?} is not FLAG=VALUE,VALUE…"))?;
        let flag = flag.trim_start_matches('-').to_owned();
        let values: Vec<String> = values.split(',').map(str::to_owned).collect();
        match flag.is_empty() || flag == "sweep" || values.iter().any(String::is_empty) {
            true => Err(format!("{text:?} has no flag to sweep, or an empty value")),
            false => Ok(Sweep { flag, values }),
        }
    }
}

/// The command line `given` once for each combination of the sweeps' values, each with what sets it apart.
pub fn variants(
    given: &[OsString],
    sweeps: &[Sweep],
) -> anyhow::Result<Vec<(String, SimulateArgs)>> {
    let num_runs = sweeps.iter().try_fold(1usize, |product, sweep| {
        product
            .checked_mul(sweep.values.len())
            .filter(|n| *n <= MAX_RUNS)
    });
    anyhow::ensure!(
        num_runs.is_some(),
        "the sweeps multiply to more than {MAX_RUNS} runs"
    );
    let mut combinations = vec![Vec::new()];
    for sweep in sweeps {
        let longer = |combination: &Vec<(String, String)>| {
            let combination = combination.clone();
            sweep.values.iter().map(move |value| {
                let mut longer = combination.clone();
                longer.push((sweep.flag.clone(), value.clone()));
                longer
            })
        };
        combinations = combinations.iter().flat_map(longer).collect();
    }
    combinations.iter().map(|c| variant(given, c)).collect()
}

fn variant(
    given: &[OsString],
    combination: &[(String, String)],
) -> anyhow::Result<(String, SimulateArgs)> {
    let setting = |(flag, value): &(String, String)| format!("{flag}={value}");
    let label = combination
        .iter()
        .map(setting)
        .collect::<Vec<_>>()
        .join(" ");
    let flags = combination
        .iter()
        .map(|pair| OsString::from(format!("--{}", setting(pair))));
    let parsed = Cli::try_parse_from(given.iter().cloned().chain(flags))
        .map_err(|error| anyhow::anyhow!("{}", first_line(&error.to_string())))
        .with_context(|| format!("--sweep {label}"))?;
    match parsed.command {
        Command::Simulate(args) => Ok((label, *args)),
        _ => anyhow::bail!("not a simulation"),
    }
}

fn first_line(text: &str) -> &str {
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(words: &[&str]) -> Vec<OsString> {
        let words = ["millpond", "simulate"].iter().chain(words);
        words.map(OsString::from).collect()
    }

    fn sweep(text: &str) -> Sweep {
        text.parse().expect("it is right")
    }

    #[test]
    fn every_combination_is_the_same_command_with_other_values() {
        let given = given(&["--generate", "poisson", "--rate", "9"]);
        let sweeps = [sweep("rate=1,2"), sweep("--block-size=16,32")];
        let runs = variants(&given, &sweeps).expect("they parse");
        let seen: Vec<_> = runs
            .iter()
            .map(|(label, args)| (label.as_str(), args.arrivals.rate, args.workers.block_size))
            .collect();
        assert_eq!(
            seen,
            [
                ("rate=1 block-size=16", 1.0, 16),
                ("rate=1 block-size=32", 1.0, 32),
                ("rate=2 block-size=16", 2.0, 16),
                ("rate=2 block-size=32", 2.0, 32),
            ]
        );
        assert_eq!(variants(&given, &[]).expect("it parses").len(), 1);
    }

    #[test]
    fn what_cannot_be_swept_is_named() {
        let error = |text| {
            format!(
                "{:#}",
                variants(&given(&[]), &[sweep(text)]).expect_err("wrong")
            )
        };
        assert!(error("colour=red").contains("--sweep colour=red: unexpected argument '--colour'"));
        assert!(error("rate=fast").contains("is not a number above zero"));
        let many = (0..2_000)
            .map(|n| n.to_string())
            .collect::<Vec<_>>()
            .join(",");
        assert!(error(&format!("seed={many}")).contains("more than 1000 runs"));
        for wrong in ["rate", "=1", "rate=", "sweep=a"] {
            assert!(wrong.parse::<Sweep>().is_err(), "{wrong}");
        }
    }
}
