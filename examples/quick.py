"""The flag that all examples share."""


def parsed(parser, **sizes):
    """The options; with --quick, these sizes take the place of defaults, and the example takes seconds."""
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**sizes)
    return parser.parse_args()
